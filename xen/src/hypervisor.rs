//! The calls to the hypervisor and to the toolstack's database, and how they fail.

use pagefold_engine::hash::PageBytes;
use pagefold_engine::units::Pages;
use std::fmt;
use std::io;

/// A guest, by the hypervisor's number. Numbers are given out again only after all others.
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
    /// The guest.
    pub domain: DomainId,
    pub frame: Gfn,
}

/// What the hypervisor calls a frame that may be shared, from a counter that grows. It dies with the first write to a page that has the
/// frame alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// A page that may be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nominated {
    pub page: GuestPage,
    /// The handle of its frame.
    pub handle: Handle,
}

/// A guest as the hypervisor lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Domain {
    /// Its number.
    pub id: DomainId,
    /// What the toolstack calls it: a UUID.
    pub uuid: [u8; 16],
    /// Whether it is being destroyed, or has shut down.
    pub ended: bool,
    /// Whether it is an HVM or PVH guest. Otherwise it is a PV guest.
    pub hvm: bool,
    /// Whether the processor translates its addresses (hardware-assisted paging).
    pub hap: bool,
    /// Memory that it has alone.
    pub own: Pages,
    /// The most that it may have.
    pub most: Pages,
    /// Its pages that are nominated or shared.
    pub shared: Pages,
    /// Its memory that is populated on demand, beyond what the hypervisor has set aside for that.
    pub lacking: Pages,
    /// Its processors.
    pub vcpus: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// All of it.
    pub total: Pages,
    /// What the hypervisor has left.
    pub free: Pages,
    /// Frames saved by sharing.
    pub saved: Pages,
    /// Frames that are nominated or shared.
    pub frames: Pages,
}

/// Why the hypervisor does not share a guest's memory.
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

/// How a call failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The guest does not exist any more, or is being destroyed.
    #[error("the guest has ended")]
    Ended,
    /// Dom0 or another guest has mapped the page, or it is changing just now.
    #[error("the page is in use")]
    Busy,
    /// The page is none that can be shared: not present, a device's, or one of the hypervisor's.
    #[error("the page cannot be shared")]
    Unfit,
    /// The page that was to be replaced was written.
    #[error("the page to replace was written")]
    ClientChanged,
    /// The page that was to replace it was written.
    #[error("the page to keep was written")]
    SourceChanged,
    /// The hypervisor has no memory left.
    #[error("the hypervisor has no memory left")]
    NoMemory,
    /// The option is missing.
    #[error("the hypervisor was built without memory sharing")]
    NoSharing,
    /// Not root, or not dom0.
    #[error("not permitted; run as root in dom0")]
    Denied,
    /// Anything else.
    #[error("{call}: {error}")]
    Other { call: &'static str, error: io::Error },
}

/// What is called with each page of a read: its place in the list, and its contents, if it could be mapped.
pub type See<'a> = dyn FnMut(usize, Option<&PageBytes>) + 'a;

/// The hypervisor, and what the toolstack knows of guests.
///
/// No call keeps a page mapped when it returns: the hypervisor nominates no page that dom0 has mapped.
pub trait Hypervisor {
    /// All guests but dom0.
    ///
    /// # Errors
    /// If they cannot be listed.
    fn domains(&mut self) -> Result<Vec<Domain>, CallError>;

    /// The name of a guest, as operators give it.
    fn name(&mut self, domain: DomainId) -> Option<String>;

    /// The kernel of a guest, if the toolstack has recorded it.
    fn kernel(&mut self, domain: DomainId) -> Option<String>;

    /// The memory of the machine.
    ///
    /// # Errors
    /// If the hypervisor does not tell, for example because it cannot share memory.
    fn memory(&mut self) -> Result<MachineMemory, CallError>;

    /// Allows memory of a guest to be shared.
    ///
    /// # Errors
    /// Why it must not.
    fn enable(&mut self, domain: DomainId) -> Result<(), Refusal>;

    /// Forbids it again. Only for a guest of which nothing is shared.
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
    /// If none can be mapped.
    fn read(&mut self, domain: DomainId, frames: &[Gfn], see: &mut See<'_>) -> Result<(), CallError>;

    /// Makes pages of a guest its own again. Returns which are.
    ///
    /// # Errors
    /// If none can be mapped.
    fn unshare(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError>;

    /// How many pages have the frame of this one, which is nominated or shared. `None`: it is neither.
    ///
    /// # Errors
    /// If the guest has ended.
    fn sharers(&mut self, page: GuestPage) -> Result<Option<u32>, CallError>;

    /// Nominates a page: a write to it makes it the guest's own again. Of one that is nominated or shared, the handle only.
    ///
    /// # Errors
    /// If it cannot be shared.
    fn nominate(&mut self, page: GuestPage) -> Result<Handle, CallError>;

    /// Makes all pages that have the client's frame have the source's instead, without a look at what they hold. The hypervisor panics
    /// if a guest other than these two has the client's frame.
    ///
    /// # Errors
    /// If one of the handles has died. Then nothing was changed.
    fn share(&mut self, source: Nominated, client: Nominated) -> Result<(), CallError>;
}
