//! Makes the calls through Xen's libraries. We load these at run time, so that a machine without Xen doesn't need them.
//!
//! We only load the libraries of Xen 4.17, because the structures that they fill in belong to a version. We suppress
//! their own messages: an error is one line of ours. `xen/machine/inspect.c` checks the sizes of the structures at
//! compile time.

use crate::hypervisor::{
    CallError, Domain, DomainId, Gfn, GuestPage, Handle, Hypervisor, MachineMemory, Nominated, Refusal, See,
};
use libloading::Library;
use pagefold_engine::hash::PageBytes;
use pagefold_engine::units::{PAGE_SIZE, Pages, count};
use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::io;
use std::path::Path;
use std::ptr;

/// The version of Xen whose libraries we know.
pub const VERSION: &str = "4.17";
const CONTROL: &str = "libxenctrl.so.4.17";
const MEMORY: &str = "libxenforeignmemory.so.1";
const STORE: &str = "libxenstore.so.4";
/// The device through which dom0 reaches the hypervisor.
const PRIVCMD: &str = "/dev/xen/privcmd";
/// Says which roles this kernel has under the hypervisor.
const CAPABILITIES: &str = "/proc/xen/capabilities";

/// How many frames we ask about in one call at most: the hypervisor's limit.
const POPULATED_MOST: usize = 1024;
/// How many pages we map at a time, at most.
const MAPPED_MOST: usize = 256;
/// How many guests we ask for at a time.
const DOMAINS_AT_ONCE: usize = 64;

/// Why we can't reach Xen.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This isn't a machine with Xen, or not its dom0.
    #[error("this is not the dom0 of a machine with Xen ({path}: {why})")]
    NotDom0 {
        /// The file that says so.
        path: &'static str,
        /// The problem with it.
        why: String,
    },
    /// A library is missing.
    #[error("cannot load {library}, of the libraries of Xen {VERSION}: {why}")]
    NoLibrary {
        library: &'static str,
        /// The loader's reason.
        why: String,
    },
    /// A library could not open its device.
    #[error("{library} cannot be opened: {error}")]
    Open { library: &'static str, error: io::Error },
}

/// A domain from the hypervisor's list: `struct xen_domctl_getdomaininfo` of Xen 4.17.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct DomainInfo {
    domain: u16,
    pad: u16,
    flags: u32,
    own_pages: u64,
    most_pages: u64,
    outstanding_pages: u64,
    shared_pages: u64,
    paged_pages: u64,
    shared_info_frame: u64,
    cpu_time_ns: u64,
    online_vcpus: u32,
    last_vcpu: u32,
    security: u32,
    uuid: [u8; 16],
    cpupool: u32,
    address_bits: u8,
    pad2: [u8; 7],
    arch: [u32; 2],
}

const _: () = assert!(size_of::<DomainInfo>() == 112);

/// Bits of its flags.
const DYING: u32 = 1 << 0;
const HVM: u32 = 1 << 1;
const SHUT_DOWN: u32 = 1 << 2;
const HAP: u32 = 1 << 8;

/// The machine: `struct xen_sysctl_physinfo` of Xen 4.17.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct PhysInfo {
    counts: [u32; 10],
    total_pages: u64,
    free_pages: u64,
    scrub_pages: u64,
    outstanding_pages: u64,
    last_frame: u64,
    processor: [u32; 8],
}

const _: () = assert!(size_of::<PhysInfo>() == 112);

/// In the upper four bits of a frame's type: the frame isn't populated.
const NO_FRAME: u64 = 0xf << 28;
const TYPE_BITS: u64 = 0xf << 28;

/// `struct xentoollog_logger`.
#[repr(C)]
struct Logger {
    message: extern "C" fn(*mut Logger, c_uint, c_int, *const c_char, *const c_char, *mut c_void),
    progress: extern "C" fn(*mut Logger, *const c_char, *const c_char, c_int, c_ulong, c_ulong),
    destroy: extern "C" fn(*mut Logger),
}

extern "C" fn no_message(_: *mut Logger, _: c_uint, _: c_int, _: *const c_char, _: *const c_char, _: *mut c_void) {}
extern "C" fn no_progress(_: *mut Logger, _: *const c_char, _: *const c_char, _: c_int, _: c_ulong, _: c_ulong) {}
extern "C" fn no_destroy(_: *mut Logger) {}

/// Defines the functions of a library that we use, and how to look them up.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident of $library:ident { $($function:ident: fn($($argument:ty),*) $(-> $result:ty)?;)* }) => {
        $(#[$doc])*
        struct $name {
            $($function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            // The functions are only valid while the library is loaded.
            _loaded: Library,
        }

        impl $name {
            fn load() -> Result<Self, OpenError> {
                let no = |error: libloading::Error| OpenError::NoLibrary { library: $library, why: error.to_string() };
                // SAFETY: this is the system's library of this name and version. Its start code opens and starts
                // nothing.
                let library = unsafe { Library::new($library) }.map_err(no)?;
                Ok(Self {
                    $(
                        // SAFETY: the type matches this function in the headers of this version.
                        $function: *unsafe {
                            library.get(concat!(stringify!($function), "\0").as_bytes())
                        }.map_err(no)?,
                    )*
                    _loaded: library,
                })
            }
        }
    };
}

functions! {
    /// libxenctrl: the hypervisor.
    ControlLibrary of CONTROL {
        xc_interface_open: fn(*const Logger, *const Logger, c_uint) -> *mut c_void;
        xc_interface_close: fn(*mut c_void) -> c_int;
        xc_domain_getinfolist: fn(*mut c_void, u32, c_uint, *mut DomainInfo) -> c_int;
        xc_domain_maximum_gpfn: fn(*mut c_void, u32, *mut c_ulong) -> c_int;
        xc_get_pfn_type_batch: fn(*mut c_void, u32, c_uint, *mut c_ulong) -> c_int;
        xc_domain_get_pod_target: fn(*mut c_void, u32, *mut u64, *mut u64, *mut u64) -> c_int;
        xc_physinfo: fn(*mut c_void, *mut PhysInfo) -> c_int;
        xc_sharing_freed_pages: fn(*mut c_void) -> c_long;
        xc_sharing_used_frames: fn(*mut c_void) -> c_long;
        xc_memshr_control: fn(*mut c_void, u32, c_int) -> c_int;
        xc_memshr_nominate_gfn: fn(*mut c_void, u32, c_ulong, *mut u64) -> c_int;
        xc_memshr_share_gfns: fn(*mut c_void, u32, c_ulong, u64, u32, c_ulong, u64) -> c_int;
        xc_memshr_debug_gfn: fn(*mut c_void, u32, c_ulong) -> c_int;
    }
}

functions! {
    /// libxenforeignmemory: guests' memory.
    MemoryLibrary of MEMORY {
        xenforeignmemory_open: fn(*const Logger, c_uint) -> *mut c_void;
        xenforeignmemory_close: fn(*mut c_void) -> c_int;
        xenforeignmemory_map: fn(*mut c_void, u32, c_int, usize, *const c_ulong, *mut c_int) -> *mut c_void;
        xenforeignmemory_unmap: fn(*mut c_void, *mut c_void, usize) -> c_int;
    }
}

functions! {
    /// libxenstore: what the toolstack knows of guests.
    StoreLibrary of STORE {
        xs_open: fn(c_ulong) -> *mut c_void;
        xs_close: fn(*mut c_void);
        xs_read: fn(*mut c_void, u32, *const c_char, *mut c_uint) -> *mut c_void;
    }
}

/// The hypervisor, from dom0.
pub struct Xen {
    control: ControlLibrary,
    memory: MemoryLibrary,
    store: StoreLibrary,
    // The handles that the libraries gave us; never null.
    hypervisor: *mut c_void,
    mappings: *mut c_void,
    database: *mut c_void,
    /// The libraries keep the logger's address.
    _logger: Box<Logger>,
}

impl Xen {
    /// Loads the libraries and opens the hypervisor.
    ///
    /// # Errors
    /// If this isn't dom0, or a library is missing or refuses.
    pub fn open() -> Result<Self, OpenError> {
        let not_dom0 = |path, why: String| OpenError::NotDom0 { path, why };
        let capabilities =
            std::fs::read_to_string(CAPABILITIES).map_err(|error| not_dom0(CAPABILITIES, error.to_string()))?;
        if !capabilities.contains("control_d") {
            return Err(not_dom0(CAPABILITIES, "it does not say control_d".to_owned()));
        }
        if !Path::new(PRIVCMD).exists() {
            return Err(not_dom0(PRIVCMD, "not found".to_owned()));
        }
        let control = ControlLibrary::load()?;
        let memory = MemoryLibrary::load()?;
        let store = StoreLibrary::load()?;
        let logger = Box::new(Logger { message: no_message, progress: no_progress, destroy: no_destroy });
        let at: *const Logger = &raw const *logger;
        // SAFETY: the logger lives as long as the handle, in a box that doesn't move.
        let hypervisor = opened(CONTROL, unsafe { (control.xc_interface_open)(at, at, 0) })?;
        // SAFETY: as above.
        let mappings = opened(MEMORY, unsafe { (memory.xenforeignmemory_open)(at, 0) });
        // SAFETY: `xs_open` takes no pointer.
        let database = opened(STORE, unsafe { (store.xs_open)(0) });
        match (mappings, database) {
            (Ok(mappings), Ok(database)) => {
                Ok(Self { control, memory, store, hypervisor, mappings, database, _logger: logger })
            }
            (mappings, database) => {
                // SAFETY: the handles were opened above, and nothing uses them again.
                unsafe {
                    (control.xc_interface_close)(hypervisor);
                    if let Ok(mappings) = &mappings {
                        (memory.xenforeignmemory_close)(*mappings);
                    }
                    if let Ok(database) = &database {
                        (store.xs_close)(*database);
                    }
                }
                Err(mappings
                    .and(database)
                    .err()
                    .unwrap_or(OpenError::Open { library: STORE, error: io::Error::from(io::ErrorKind::Other) }))
            }
        }
    }

    /// A value of the toolstack's database.
    fn stored(&mut self, path: &str) -> Option<String> {
        let path = CString::new(path).ok()?;
        let mut length = 0;
        // SAFETY: the path ends with a zero, and `length` outlives the call.
        let value = unsafe { (self.store.xs_read)(self.database, 0, path.as_ptr(), &raw mut length) };
        if value.is_null() {
            return None;
        }
        let length = usize::try_from(length).unwrap_or(0);
        // SAFETY: the library returns `length` bytes that it has allocated with malloc, for the caller to free.
        let bytes = unsafe {
            let bytes = std::slice::from_raw_parts(value.cast::<u8>(), length).to_vec();
            libc::free(value);
            bytes
        };
        String::from_utf8(bytes).ok()
    }

    /// How much of a guest's populate-on-demand memory the hypervisor hasn't set pages aside for.
    fn lacking(&mut self, domain: DomainId) -> Result<Pages, CallError> {
        let mut all = 0;
        let mut set_aside = 0;
        let mut on_demand = 0;
        // SAFETY: the three numbers outlive the call.
        let done = unsafe {
            (self.control.xc_domain_get_pod_target)(
                self.hypervisor,
                domain.0.into(),
                &raw mut all,
                &raw mut set_aside,
                &raw mut on_demand,
            )
        };
        if done != 0 {
            return Err(error("xc_domain_get_pod_target"));
        }
        Ok(Pages(on_demand).saturating_sub(Pages(set_aside)))
    }

    /// Maps up to [`MAPPED_MOST`] pages of a guest, calls `each` with the address of each page that we could map, and
    /// unmaps them.
    fn with_mapped(
        &mut self,
        domain: DomainId,
        frames: &[Gfn],
        rights: c_int,
        mut each: impl FnMut(usize, Option<*const u8>),
    ) -> Result<(), CallError> {
        let numbers: Vec<c_ulong> = frames.iter().map(|frame| frame.0).collect();
        let mut errors = vec![0; frames.len()];
        // SAFETY: both lists have as many entries as we say, and outlive the call.
        let mapped = unsafe {
            (self.memory.xenforeignmemory_map)(
                self.mappings,
                domain.0.into(),
                rights,
                numbers.len(),
                numbers.as_ptr(),
                errors.as_mut_ptr(),
            )
        };
        if mapped.is_null() {
            return Err(error("xenforeignmemory_map"));
        }
        for (at, &failed) in errors.iter().enumerate() {
            // SAFETY: the mapping has a page for each frame.
            let address = unsafe { mapped.cast::<u8>().cast_const().add(at * PAGE_SIZE) };
            each(at, if failed == 0 { Some(address) } else { None });
        }
        // SAFETY: we mapped it above with as many pages, and no address of it is left.
        if unsafe { (self.memory.xenforeignmemory_unmap)(self.mappings, mapped, numbers.len()) } != 0 {
            return Err(error("xenforeignmemory_unmap"));
        }
        Ok(())
    }
}

impl Drop for Xen {
    fn drop(&mut self) {
        // SAFETY: the handles are open, and nothing uses them again.
        unsafe {
            (self.store.xs_close)(self.database);
            (self.memory.xenforeignmemory_close)(self.mappings);
            (self.control.xc_interface_close)(self.hypervisor);
        }
    }
}

/// Checks the handle that a library has just returned, which is null if it failed.
fn opened(library: &'static str, handle: *mut c_void) -> Result<*mut c_void, OpenError> {
    if handle.is_null() { Err(OpenError::Open { library, error: io::Error::last_os_error() }) } else { Ok(handle) }
}

/// Makes an error from the errno of a call that has just failed.
fn error(call: &'static str) -> CallError {
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT | libc::ENXIO) => CallError::Ended,
        Some(libc::E2BIG | libc::EBUSY | libc::EAGAIN | libc::EEXIST) => CallError::Busy,
        Some(libc::EINVAL) => CallError::Unfit,
        Some(libc::ENOMEM) => CallError::NoMemory,
        Some(libc::ENOSYS) => CallError::NoSharing,
        Some(libc::EPERM | libc::EACCES) => CallError::Denied,
        _ => CallError::Other { call, error },
    }
}

/// `XENMEM_SHARING_OP_S_HANDLE_INVALID` and `_C_HANDLE_INVALID`, which come as error numbers.
const SOURCE_CHANGED: i32 = 10;
const CLIENT_CHANGED: i32 = 9;

impl Hypervisor for Xen {
    fn domains(&mut self) -> Result<Vec<Domain>, CallError> {
        let mut domains = Vec::new();
        let mut first = 1;
        loop {
            let mut page = [DomainInfo::default(); DOMAINS_AT_ONCE];
            let most = c_uint::try_from(page.len()).unwrap_or(0);
            // SAFETY: the list has that many entries of the library's layout.
            let found =
                unsafe { (self.control.xc_domain_getinfolist)(self.hypervisor, first, most, page.as_mut_ptr()) };
            let Ok(found) = usize::try_from(found) else { return Err(error("xc_domain_getinfolist")) };
            for info in page.iter().take(found) {
                let mut domain = domain(info);
                if domain.hvm && !domain.ended {
                    match self.lacking(domain.id) {
                        Ok(lacking) => domain.lacking = lacking,
                        Err(CallError::Ended) => domain.ended = true,
                        Err(error) => return Err(error),
                    }
                }
                domains.push(domain);
            }
            match page.get(found.wrapping_sub(1)) {
                Some(last) if found == page.len() => first = u32::from(last.domain) + 1,
                _ => return Ok(domains),
            }
        }
    }

    fn name(&mut self, domain: DomainId) -> Option<String> {
        self.stored(&format!("/local/domain/{domain}/name"))
    }

    fn kernel(&mut self, domain: DomainId) -> Option<String> {
        let vm = self.stored(&format!("/local/domain/{domain}/vm"))?;
        self.stored(&format!("{vm}/image/kernel"))
    }

    fn memory(&mut self) -> Result<MachineMemory, CallError> {
        let mut info = PhysInfo::default();
        // SAFETY: `info` has the library's layout, and outlives the call.
        if unsafe { (self.control.xc_physinfo)(self.hypervisor, &raw mut info) } != 0 {
            return Err(error("xc_physinfo"));
        }
        // SAFETY: it takes only the handle.
        let saved = unsafe { (self.control.xc_sharing_freed_pages)(self.hypervisor) };
        let Ok(saved) = u64::try_from(saved) else { return Err(error("xc_sharing_freed_pages")) };
        // SAFETY: as above.
        let frames = unsafe { (self.control.xc_sharing_used_frames)(self.hypervisor) };
        let Ok(frames) = u64::try_from(frames) else { return Err(error("xc_sharing_used_frames")) };
        let total = Pages(info.total_pages);
        Ok(MachineMemory { total, free: Pages(info.free_pages), saved: Pages(saved), frames: Pages(frames) })
    }

    fn enable(&mut self, domain: DomainId) -> Result<(), Refusal> {
        // SAFETY: it takes the handle and numbers.
        if unsafe { (self.control.xc_memshr_control)(self.hypervisor, domain.0.into(), 1) } == 0 {
            return Ok(());
        }
        Err(match io::Error::last_os_error().raw_os_error() {
            Some(libc::EOPNOTSUPP) => Refusal::NotSupported,
            Some(libc::ENODEV) => Refusal::NoHap,
            Some(libc::EXDEV) => Refusal::Passthrough,
            _ => Refusal::Call(error("xc_memshr_control")),
        })
    }

    fn disable(&mut self, domain: DomainId) {
        // SAFETY: it takes the handle and numbers. If it fails, sharing stays allowed, which shares nothing.
        unsafe { (self.control.xc_memshr_control)(self.hypervisor, domain.0.into(), 0) };
    }

    fn last_frame(&mut self, domain: DomainId) -> Result<Gfn, CallError> {
        let mut last = 0;
        // SAFETY: `last` outlives the call.
        match unsafe { (self.control.xc_domain_maximum_gpfn)(self.hypervisor, domain.0.into(), &raw mut last) } {
            found if found < 0 => Err(error("xc_domain_maximum_gpfn")),
            _ => Ok(Gfn(last)),
        }
    }

    fn populated(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError> {
        let mut populated = Vec::with_capacity(frames.len());
        for frames in frames.chunks(POPULATED_MOST) {
            let mut types: Vec<c_ulong> = frames.iter().map(|frame| frame.0).collect();
            let number = c_uint::try_from(types.len()).unwrap_or(0);
            // SAFETY: the list has that many entries, and the library replaces them with types.
            let done = unsafe {
                (self.control.xc_get_pfn_type_batch)(self.hypervisor, domain.0.into(), number, types.as_mut_ptr())
            };
            if done != 0 {
                return Err(error("xc_get_pfn_type_batch"));
            }
            populated.extend(types.iter().map(|kind| kind & TYPE_BITS != NO_FRAME));
        }
        Ok(populated)
    }

    fn read(&mut self, domain: DomainId, frames: &[Gfn], see: &mut See<'_>) -> Result<(), CallError> {
        let mut page: PageBytes = [0; PAGE_SIZE];
        for (number, frames) in frames.chunks(MAPPED_MOST).enumerate() {
            self.with_mapped(domain, frames, libc::PROT_READ, |at, address| {
                let at = number * MAPPED_MOST + at;
                let Some(address) = address else { return see(at, None) };
                // SAFETY: a page is mapped there. The guest may write to it meanwhile, so we copy it and never refer to
                // it.
                unsafe { ptr::copy_nonoverlapping(address, page.as_mut_ptr(), PAGE_SIZE) };
                see(at, Some(&page));
            })?;
        }
        Ok(())
    }

    fn unshare(&mut self, domain: DomainId, frames: &[Gfn]) -> Result<Vec<bool>, CallError> {
        // Before the hypervisor lets dom0 map a page for writing, it gives the page a frame of its own. We write
        // nothing.
        let mut own = vec![false; frames.len()];
        for (number, frames) in frames.chunks(MAPPED_MOST).enumerate() {
            self.with_mapped(domain, frames, libc::PROT_READ | libc::PROT_WRITE, |at, address| {
                own[number * MAPPED_MOST + at] = address.is_some();
            })?;
        }
        Ok(own)
    }

    fn sharers(&mut self, page: GuestPage) -> Result<Option<u32>, CallError> {
        // SAFETY: it takes the handle and numbers.
        let found = unsafe { (self.control.xc_memshr_debug_gfn)(self.hypervisor, page.domain.0.into(), page.frame.0) };
        match u32::try_from(found) {
            Ok(found) => Ok(Some(found)),
            Err(_) => match error("xc_memshr_debug_gfn") {
                // The page isn't shared or isn't present, or the guest may not share.
                CallError::Unfit => Ok(None),
                CallError::Other { error, .. } if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
                error => Err(error),
            },
        }
    }

    fn nominate(&mut self, page: GuestPage) -> Result<Handle, CallError> {
        let GuestPage { domain, frame } = page;
        let mut handle = 0;
        // SAFETY: `handle` outlives the call.
        let done = unsafe {
            (self.control.xc_memshr_nominate_gfn)(self.hypervisor, domain.0.into(), frame.0, &raw mut handle)
        };
        if done == 0 { Ok(Handle(handle)) } else { Err(error("xc_memshr_nominate_gfn")) }
    }

    fn share(&mut self, source: Nominated, client: Nominated) -> Result<(), CallError> {
        // SAFETY: it takes the handle and numbers.
        let done = unsafe {
            (self.control.xc_memshr_share_gfns)(
                self.hypervisor,
                source.page.domain.0.into(),
                source.page.frame.0,
                source.handle.0,
                client.page.domain.0.into(),
                client.page.frame.0,
                client.handle.0,
            )
        };
        if done == 0 {
            return Ok(());
        }
        Err(match io::Error::last_os_error().raw_os_error() {
            Some(SOURCE_CHANGED) => CallError::SourceChanged,
            Some(CLIENT_CHANGED) => CallError::ClientChanged,
            _ => error("xc_memshr_share_gfns"),
        })
    }
}

fn domain(info: &DomainInfo) -> Domain {
    Domain {
        id: DomainId(info.domain),
        uuid: info.uuid,
        ended: info.flags & (DYING | SHUT_DOWN) != 0,
        hvm: info.flags & HVM != 0,
        hap: info.flags & HAP != 0,
        own: Pages(info.own_pages),
        most: Pages(info.most_pages),
        shared: Pages(info.shared_pages),
        lacking: Pages(0),
        vcpus: count(usize::try_from(info.last_vcpu).unwrap_or(0)).saturating_add(1).try_into().unwrap_or(u32::MAX),
    }
}
