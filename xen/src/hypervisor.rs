//! The calls to the hypervisor and to the toolstack's database, and the ways they fail.

use pagefold_engine::hash::PageBytes;
use pagefold_engine::units::Pages;
use std::fmt;
use std::io;

/// A guest, by the hypervisor's number. The hypervisor reuses a number only after all others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u16);

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a frame of guest memory, as the guest counts frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gfn(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPage {
    pub domain: DomainId,
    pub frame: Gfn,
}

/// The hypervisor's name for a frame that may be shared. Names come from a counter that only grows. If a frame has only
/// one page, a write to that page ends the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// A page that the hypervisor may share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nominated {
    pub page: GuestPage,
    pub handle: Handle,
}

/// A guest as the hypervisor lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Domain {
    pub id: DomainId,
    /// The toolstack's name for the guest: a UUID.
    pub uuid: [u8; 16],
    /// Whether it's being destroyed, or has shut down.
    pub ended: bool,
    /// Whether it's an HVM or PVH guest. Otherwise it's a PV guest.
    pub hvm: bool,
    /// Whether the processor translates the guest's addresses (hardware-assisted paging).
    pub hap: bool,
    /// How much memory it shares with no other guest.
    pub own: Pages,
    /// How much memory it may have at most.
    pub most: Pages,
    /// How many of its pages are nominated or shared.
    pub shared: Pages,
    /// How much of its populate-on-demand memory the hypervisor hasn't set pages aside for.
    pub lacking: Pages,
    /// Its processors.
    pub vcpus: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineMemory {
    pub total: Pages,
    /// How much memory the hypervisor has left.
    pub free: Pages,
    /// How many frames sharing saves.
    pub saved: Pages,
    /// How many frames are nominated or shared.
    pub frames: Pages,
}

/// Why the hypervisor doesn't share a guest's memory.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It's a PV guest, or the processor isn't Intel's.
    #[error("the hypervisor shares memory of HVM and PVH guests on Intel processors only")]
    NotSupported,
    /// The guest uses shadow page tables.
    #[error("it does not use hardware-assisted paging (hap)")]
    NoHap,
    /// A device of the machine accesses the guest's memory directly.
    #[error("a device is passed through to it")]
    Passthrough,
    #[error("{0}")]
    Call(#[from] CallError),
}

/// The ways a call fails.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The guest no longer exists, or is being destroyed.
    #[error("the guest has ended")]
    Ended,
    /// Dom0 or another guest has mapped the page, or the page is just changing.
    #[error("the page is in use")]
    Busy,
    /// The page can't be shared: it isn't present, or belongs to a device or the hypervisor.
    #[error("the page cannot be shared")]
    Unfit,
    /// Someone wrote the page that we wanted to replace.
    #[error("the page to replace was written")]
    ClientChanged,
    /// Someone wrote the page that we wanted to keep.
    #[error("the page to keep was written")]
    SourceChanged,
    #[error("the hypervisor has no memory left")]
    NoMemory,
    /// The hypervisor was built without the option.
    #[error("the hypervisor was built without memory sharing")]
    NoSharing,
    /// The caller isn't root, or this isn't dom0.
    #[error("not permitted; run as root in dom0")]
    Denied,
    #[error("{call}: {error}")]
    Other { call: &'static str, error: io::Error },
}

/// A read calls this with each page: its place in the list, and its contents if we could map it.
pub type See<'a> = dyn FnMut(usize, Option<&PageBytes>) + 'a;

/// The hypervisor, and what the toolstack knows of guests.
///
/// No call may leave a page mapped when it returns, because the hypervisor doesn't nominate pages that dom0 has mapped.
pub trait Hypervisor {
    /// All guests but dom0.
    ///
    /// # Errors
    /// If we can't list them.
    fn domains(&mut self) -> Result<Vec<Domain>, CallError>;

    /// The name of a guest, as operators give it.
    fn name(&mut self, domain: DomainId) -> Option<String>;

    /// The kernel of a guest, if the toolstack has recorded it.
    fn kernel(&mut self, domain: DomainId) -> Option<String>;

    /// If the hypervisor doesn't answer, for example because it can't share memory.
    fn memory(&mut self) -> Result<MachineMemory, CallError>;

    /// Allows sharing a guest's memory.
    ///
    /// # Errors
    /// The hypervisor's reason to refuse.
    fn enable(&mut self, domain: DomainId) -> Result<(), Refusal>;

    /// Forbids sharing again. Only for a guest that shares nothing.
    fn disable(&mut self, domain: DomainId);

    /// The highest frame number of a guest.
    ///
    /// # Errors
    /// If the guest has ended.
    fn last_frame(&mut self, domain: DomainId) -> Result<Gfn, CallError>;

    /// Which of these frames are populated.
    ///
    /// # Errors
    /// If the guest has ended.
    fn populated(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError>;

    /// Reads pages of a guest, which stay shared. Calls `see` once for each, in order.
    fn read(&mut self, domain: DomainId, frames: &[Gfn], see: &mut See<'_>) -> Result<(), CallError>;

    /// Gives a guest its own copies of pages again. Returns which pages are now its own.
    fn unshare(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError>;

    /// How many pages have this page's frame, if the frame is nominated or shared. `None` if it's neither.
    ///
    /// # Errors
    /// If the guest has ended.
    fn sharers(&mut self, page: GuestPage) -> Result<Option<u32>, CallError>;

    /// Nominates a page for sharing. From now on a write makes the page the guest's own again. If the page is already
    /// nominated or shared, this only returns the handle.
    fn nominate(&mut self, page: GuestPage) -> Result<Handle, CallError>;

    /// Replaces the client's frame by the source's in all pages that have it, without looking at the contents. The
    /// hypervisor panics if a guest other than these two has the client's frame.
    ///
    /// # Errors
    /// If one of the handles has died. Then nothing has changed.
    fn share(&mut self, source: Nominated, client: Nominated) -> Result<(), CallError>;
}
