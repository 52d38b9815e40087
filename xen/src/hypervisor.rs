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

/// The number of a guest's frame of memory, as the guest counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gfn(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPage {
    pub domain: DomainId,
    pub frame: Gfn,
}

/// The hypervisor's name for a frame that may be shared. Names come from a counter that grows. A name dies with the
/// first write to a page that has the frame alone.
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
    /// Whether the processor translates its addresses (hardware-assisted paging).
    pub hap: bool,
    /// Memory that no other guest shares.
    pub own: Pages,
    /// The most memory that it may have.
    pub most: Pages,
    /// Its pages that are nominated or shared.
    pub shared: Pages,
    /// Its populate-on-demand memory, beyond the pages that the hypervisor has set aside for it.
    pub lacking: Pages,
    /// Its processors.
    pub vcpus: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// The machine's memory.
    pub total: Pages,
    /// Memory that the hypervisor has left.
    pub free: Pages,
    /// Frames saved by sharing.
    pub saved: Pages,
    /// Frames that are nominated or shared.
    pub frames: Pages,
}

/// Why the hypervisor doesn't share a guest's memory.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// PV, or a processor other than Intel's.
    #[error("the hypervisor shares memory of HVM and PVH guests on Intel processors only")]
    NotSupported,
    /// Shadow page tables.
    #[error("it does not use hardware-assisted paging (hap)")]
    NoHap,
    /// A device of the machine reads and writes its memory.
    #[error("a device is passed through to it")]
    Passthrough,
    /// Another reason.
    #[error("{0}")]
    Call(#[from] CallError),
}

/// The ways a call fails.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The guest no longer exists, or is being destroyed.
    #[error("the guest has ended")]
    Ended,
    /// Dom0 or another guest has mapped the page, or the page is changing just now.
    #[error("the page is in use")]
    Busy,
    /// The page can't be shared: it's not present, a device's, or one of the hypervisor's.
    #[error("the page cannot be shared")]
    Unfit,
    /// Someone wrote the page that we wanted to replace.
    #[error("the page to replace was written")]
    ClientChanged,
    /// Someone wrote the page that we wanted to keep.
    #[error("the page to keep was written")]
    SourceChanged,
    /// The hypervisor has no memory left.
    #[error("the hypervisor has no memory left")]
    NoMemory,
    /// The option is missing.
    #[error("the hypervisor was built without memory sharing")]
    NoSharing,
    /// The caller isn't root, or this isn't dom0.
    #[error("not permitted; run as root in dom0")]
    Denied,
    /// Anything else.
    #[error("{call}: {error}")]
    Other { call: &'static str, error: io::Error },
}

/// A read calls this with each page: its place in the list, and its contents, if we could map it.
pub type See<'a> = dyn FnMut(usize, Option<&PageBytes>) + 'a;

/// The hypervisor, and the toolstack's knowledge of guests.
///
/// No call keeps a page mapped when it returns: the hypervisor nominates no page that dom0 has mapped.
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

    /// The memory of the machine.
    ///
    /// # Errors
    /// If the hypervisor doesn't tell, for example because it can't share memory.
    fn memory(&mut self) -> Result<MachineMemory, CallError>;

    /// Allows memory of a guest to be shared.
    ///
    /// # Errors
    /// Why we must not.
    fn enable(&mut self, domain: DomainId) -> Result<(), Refusal>;

    /// Forbids sharing again. Only for a guest with nothing shared.
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

    /// Reads pages of a guest, which stay shared. Calls `see` once for each, in turn.
    ///
    /// # Errors
    /// If we can map none.
    fn read(&mut self, domain: DomainId, frames: &[Gfn], see: &mut See<'_>) -> Result<(), CallError>;

    /// Gives a guest its own copies of pages again. Returns which pages are its own now.
    ///
    /// # Errors
    /// If we can map none.
    fn unshare(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError>;

    /// How many pages have this page's frame, if the frame is nominated or shared. `None` if it's neither.
    ///
    /// # Errors
    /// If the guest has ended.
    fn sharers(&mut self, page: GuestPage) -> Result<Option<u32>, CallError>;

    /// Nominates a page: a write to it makes it the guest's own again. For a page that's already nominated or shared,
    /// only returns the handle.
    ///
    /// # Errors
    /// If the page can't be shared.
    fn nominate(&mut self, page: GuestPage) -> Result<Handle, CallError>;

    /// Gives all pages that have the client's frame the source's instead, without looking at their contents. The
    /// hypervisor panics if a guest other than these two has the client's frame.
    ///
    /// # Errors
    /// If one of the handles has died. In that case nothing has changed.
    fn share(&mut self, source: Nominated, client: Nominated) -> Result<(), CallError>;
}
