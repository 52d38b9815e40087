//! State that an injection could easily lose: extended registers, shadow stacks, memory that another thread provides,
//! users, requests in progress.

use super::{ABSENT, rounds};
use crate::blocking::pipe;
use crate::checks::Memory;
use crate::hold::{call, spin};
use crate::kinds::{limit, sockets};
use crate::system::{WRITABLE, anonymous, nanosleep_us};
use std::arch::x86_64::__cpuid_count;
use std::arch::{asm, global_asm};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Waits in a call that the injector doesn't interrupt.
pub struct Doze(i32);

impl Doze {
    pub fn new() -> Self {
        let [receiver, _] = sockets();
        limit(receiver, 1);
        Self(receiver)
    }

    /// Waits for a millisecond, or until the kernel's next tick.
    pub fn doze(&self) {
        unsafe { libc::recv(self.0, [0_u8].as_mut_ptr().cast(), 1, libc::MSG_WAITALL) };
    }
}

global_asm!(
    "
// Arguments: image, memory for the state afterwards, memory for its own state, components, rounds or 0, timespec.
.globl hostile_hold_state
hostile_hold_state:
    push rbx
    push rbp
    push r12
    mov rbx, rcx
    mov rbp, rsi
    mov r12, rdx
    mov eax, -1
    mov edx, -1
    xsave64 [r12]
    mov eax, -1
    mov edx, -1
    xrstor64 [rdi]
    test r8, r8
    jz 3f
2:  dec r8
    jnz 2b
    jmp 4f
3:  mov rdi, r9
    xor esi, esi
    mov eax, 35
    syscall
4:  mov eax, ebx
    mov rdx, rbx
    shr rdx, 32
    xsave64 [rbp]
    mov eax, -1
    mov edx, -1
    xrstor64 [r12]
    pop r12
    pop rbp
    pop rbx
    ret
"
);

unsafe extern "C" {
    fn hostile_hold_state(
        image: *const u8,
        after: *mut u8,
        own: *mut u8,
        features: u64,
        rounds: u64,
        time: *const libc::timespec,
    );
}

/// Components of the extended state.
const AVX_512: u64 = 7 << 5;
const KEYS: u64 = 1 << 9;
const TILES: u64 = 3 << 17;

/// An XSAVE area in which these components are in use.
struct Image {
    features: u64,
    bytes: &'static mut [u8],
    /// The bytes to compare: all that XSAVE writes, except the last x87 instruction and operand.
    compared: Vec<Range<usize>>,
}

#[allow(unused_unsafe)]
impl Image {
    fn new(features: u64) -> Self {
        let place = |feature: u32| {
            let leaf = unsafe { __cpuid_count(0xd, feature) };
            leaf.ebx as usize..(leaf.ebx + leaf.eax) as usize
        };
        let size = unsafe { __cpuid_count(0xd, 0) }.ebx as usize;
        let bytes = unsafe { std::slice::from_raw_parts_mut(anonymous(size), size) };
        let mut compared = vec![0..5, 24..28, 32..416, 512..520];
        compared.extend((2..=18).filter(|feature| features >> feature & 1 != 0).map(place));
        for (at, byte) in compared[2..].iter().cloned().flatten().enumerate() {
            bytes[byte] = u8::try_from(at * 7 % 251).unwrap() + 1;
        }
        // The x87 registers have 80 of 128 bits; three are in use. Both units round to zero and mask all exceptions.
        bytes[32..160].chunks_exact_mut(16).for_each(|register| register[10..].fill(0));
        bytes[..5].copy_from_slice(&[0x7f, 0xe, 0, 0x28, 0xe0]);
        bytes[24..28].copy_from_slice(&[0x80, 0x7f, 0, 0]);
        bytes[512..520].copy_from_slice(&features.to_le_bytes());
        if features & KEYS != 0 {
            // Key 0, which ordinary memory has, must permit access.
            bytes[place(9)].copy_from_slice(&[0x5c, 0x39, 0xa6, 0x55, 0, 0, 0, 0]);
        }
        if features & TILES != 0 {
            // Eight tiles of 16 rows of 64 bytes.
            let tiles = &mut bytes[place(17)];
            tiles.fill(0);
            tiles[0] = 1;
            tiles[16..32].copy_from_slice(&[64, 0].repeat(8));
            tiles[48..56].fill(16);
        }
        Self { features, bytes, compared }
    }

    fn difference(&self, after: &[u8]) -> Option<usize> {
        self.compared.iter().cloned().flatten().find(|&at| self.bytes[at] != after[at])
    }
}

/// The components that the kernel has enabled.
#[target_feature(enable = "xsave")]
#[allow(unused_unsafe)]
unsafe fn enabled() -> u64 {
    unsafe { std::arch::x86_64::_xgetbv(0) }
}

/// Holds all extended registers, including AMX's and the protection keys, then fewer. A component in its initial state
/// must stay in it.
pub fn extended_states(memory: Memory) -> Result<(), String> {
    const ARCH_REQ_XCOMP_PERM: i32 = 0x1023;
    let amx = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, 18) } == 0;
    let enabled = unsafe { enabled() } & if amx { !0 } else { !TILES };
    for (features, name) in [(AVX_512, "AVX-512"), (KEYS, "protection keys"), (TILES, "AMX")] {
        if enabled & features != features {
            ABSENT.lock().unwrap().push(name);
        }
    }
    let images = [!0, !TILES, !(TILES | AVX_512), 3 | KEYS].map(|kept| Image::new(enabled & kept));
    let size = images[0].bytes.len();
    let own = anonymous(size);
    let after = unsafe { std::slice::from_raw_parts_mut(anonymous(size), size) };
    let time = libc::timespec { tv_sec: 0, tv_nsec: 50_000 };
    let mut turn = 0_usize;
    rounds(memory, || {
        turn += 1;
        let image = &images[turn % images.len()];
        let computing = if turn / images.len() % 2 == 0 { 60_000 } else { 0 };
        after.fill(0);
        unsafe {
            hostile_hold_state(image.bytes.as_ptr(), after.as_mut_ptr(), own, enabled, computing, &raw const time);
        }
        match image.difference(after) {
            None => Ok(()),
            Some(at) => Err(format!("byte {at} of the extended state {:x} changed", image.features)),
        }
    })
}

/// Calls and returns with a shadow stack. If the processor or the kernel has none, makes the same calls without one.
pub fn shadow_stack(memory: Memory) -> Result<(), String> {
    fn deep(depth: u32) -> Result<u64, String> {
        if depth == 0 {
            spin(30_000)?;
            nanosleep_us(50)?;
            return Ok(1);
        }
        Ok(deep(depth - 1)? + std::hint::black_box(1))
    }
    // This must be inline: a function would return to an address that isn't on the new shadow stack.
    let switch = |request: u64| {
        let answer: i64;
        unsafe {
            asm!("syscall", inout("rax") libc::SYS_arch_prctl => answer, in("rdi") request, in("rsi") 1, out("rcx") _, out("r11") _);
        }
        answer
    };
    let (enable, disable) = (0x5001, 0x5002);
    let enabled: i64;
    unsafe {
        asm!("syscall", inout("rax") libc::SYS_arch_prctl => enabled, in("rdi") enable, in("rsi") 1, out("rcx") _, out("r11") _);
    }
    if enabled != 0 {
        ABSENT.lock().unwrap().push("shadow stacks");
    }
    let verdict =
        rounds(memory, || if deep(20)? == 21 { Ok(()) } else { Err("a call returned another result".into()) });
    if enabled == 0 && switch(disable) != 0 {
        return Err("the shadow stack cannot be disabled".into());
    }
    verdict
}

/// Memory whose missing pages this program provides (userfaultfd). Each word holds its own address.
pub struct Faults(i32);

impl Faults {
    pub fn on(start: *mut u8, length: usize) -> Option<Self> {
        const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
        const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
        let (mut api, mut range) = ([0xaa_u64, 0, 0], [start as u64, length as u64, 1, 0]);
        unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
            let fd = i32::try_from(fd).ok()?;
            let registered = fd >= 0
                && libc::ioctl(fd, UFFDIO_API, api.as_mut_ptr()) == 0
                && libc::ioctl(fd, UFFDIO_REGISTER, range.as_mut_ptr()) == 0;
            registered.then_some(Self(fd))
        }
    }

    /// Provides pages until `over`, each after a while.
    pub fn answer(&self, over: &AtomicBool) {
        const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
        let doze = Doze::new();
        let mut message = [0_u64; 4];
        while !over.load(Ordering::Relaxed) {
            doze.doze();
            while unsafe { libc::read(self.0, message.as_mut_ptr().cast(), 32) } == 32 {
                let page = message[2] & !4095;
                let content: [u64; 512] = std::array::from_fn(|word| page + word as u64 * 8);
                let mut copy = [page, content.as_ptr().addr() as u64, 4096, 0, 0];
                // EAGAIN: the mapping is changing.
                while unsafe { libc::ioctl(self.0, UFFDIO_COPY, copy.as_mut_ptr()) } != 0
                    && std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
                {}
            }
        }
    }
}

/// Spends nearly all its time waiting for pages that another thread provides.
pub fn lazy_memory(memory: Memory) -> Result<(), String> {
    const LENGTH: usize = 8 * 4096;
    let start = anonymous(LENGTH);
    let Some(faults) = Faults::on(start, LENGTH) else {
        return Err("skip: userfaultfd is not permitted".into());
    };
    let words: *mut u64 = start.cast();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| faults.answer(&over));
        let verdict = rounds(memory, || unsafe {
            libc::madvise(start.cast(), LENGTH, libc::MADV_DONTNEED);
            for at in 0..LENGTH / 8 {
                let (address, found) = (words.add(at) as u64, words.add(at).read_volatile());
                if found != address {
                    return Err(format!("word {at} of lazy memory was {found:x}, not {address:x}"));
                }
                words.add(at).write_volatile(!address);
            }
            match (0..LENGTH / 8).find(|&at| words.add(at).read_volatile() != !(words.add(at) as u64)) {
                None => Ok(()),
                Some(at) => Err(format!("word {at} of lazy memory changed")),
            }
        });
        over.store(true, Ordering::Relaxed);
        verdict
    })
}

/// Odd while the program changes its user.
static EPOCH: AtomicU32 = AtomicU32::new(0);

/// Changes its user all the time; the C library does so by a signal to each thread. All threads must agree on the user.
pub fn users(memory: Memory) -> Result<(), String> {
    const USERS: [u32; 2] = [0, 12_345];
    let over = AtomicBool::new(false);
    let user = || {
        let mut ids = [0_u32; 3];
        let [real, effective, saved] = ids.each_mut().map(std::ptr::from_mut);
        unsafe { libc::getresuid(real, effective, saved) };
        ids[1]
    };
    if unsafe { libc::geteuid() } != 0 {
        return Err("skip: only root can change its user".into());
    }
    let sibling = || {
        while !over.load(Ordering::Relaxed) {
            let epoch = EPOCH.load(Ordering::SeqCst);
            let answer = nanosleep_us(50)?;
            spin(10_000)?;
            let found = user();
            let same = EPOCH.load(Ordering::SeqCst) == epoch && epoch % 2 == 0;
            if same && (answer != 0 || found != USERS[(epoch / 2 % 2) as usize]) {
                return Err(format!("a thread was of user {found} in epoch {epoch}, and nanosleep answered {answer}"));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let siblings: Vec<_> = (0..3).map(|_| scope.spawn(sibling)).collect();
        let verdict = rounds(memory, || {
            let epoch = EPOCH.fetch_add(1, Ordering::SeqCst) + 1;
            let next = USERS[(epoch.div_ceil(2) % 2) as usize];
            let changed = unsafe { libc::setresuid(libc::uid_t::MAX, next, libc::uid_t::MAX) };
            EPOCH.fetch_add(1, Ordering::SeqCst);
            if changed != 0 || user() != next {
                return Err(format!("changing to user {next} failed: {}", std::io::Error::last_os_error()));
            }
            spin(30_000)?;
            nanosleep_us(50)?;
            Ok(())
        });
        over.store(true, Ordering::Relaxed);
        siblings.into_iter().try_for_each(|sibling| sibling.join().unwrap()).and(verdict)
    })
}

/// Makes reads, writes and timeouts by `io_uring`, three at a time. All must be complete when the call returns.
pub fn ring(memory: Memory) -> Result<(), String> {
    const READ: u8 = 22;
    const WRITE: u8 = 23;
    const TIMEOUT: u8 = 11;
    const SUBMISSIONS: i64 = 0x1000_0000;
    let mut params = [0_u32; 30];
    let ring = crate::kinds::set_up_ring(&mut params)?;
    let mapped = |offset| unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), 4096, WRITABLE, libc::MAP_SHARED, ring, offset);
        assert_ne!(memory, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        memory.cast::<u8>()
    };
    // Linux 5.4 and later: both rings in one mapping.
    let (rings, entries) = (mapped(0), mapped(SUBMISSIONS));
    let word = |offset: u32| unsafe { &*rings.add(offset as usize).cast::<AtomicU32>() };
    // Words of the submission ring: tail, mask, array. Of the completion ring: head, tail, mask, entries.
    let (tail, mask, array) = (word(params[11]), params[12], params[16]);
    let (head, completed, entry_mask, completions) = (word(params[20]), word(params[21]), params[22], params[25]);
    let [mask, entry_mask] = [mask, entry_mask].map(|offset| word(offset).load(Ordering::Relaxed));
    let [reader, writer] = pipe();
    let (source, target) = (AtomicU64::new(0), AtomicU64::new(0));
    let time = [0_u64, 100_000];
    let submit = |opcode: u8, fd: i32, address: u64, length: u32| unsafe {
        let at = tail.load(Ordering::Relaxed);
        let entry = entries.add((at & mask) as usize * 64);
        entry.write_bytes(0, 64);
        entry.write(opcode);
        entry.add(4).cast::<i32>().write(fd);
        // A pipe has no offset. For a timeout, 0 means that completions don't end it.
        entry.add(8).cast::<u64>().write(if opcode == TIMEOUT { 0 } else { u64::MAX });
        entry.add(16).cast::<u64>().write(address);
        entry.add(24).cast::<u32>().write(length);
        entry.add(32).cast::<u64>().write(u64::from(opcode));
        rings.add(array as usize).cast::<u32>().add((at & mask) as usize).write(at & mask);
        tail.store(at.wrapping_add(1), Ordering::Release);
    };
    rounds(memory, || {
        let value = source.fetch_add(0x0101_0101_0101_0107, Ordering::Relaxed).wrapping_add(0x0101_0101_0101_0107);
        submit(READ, reader, target.as_ptr().addr() as u64, 8);
        submit(TIMEOUT, -1, time.as_ptr().addr() as u64, 1);
        submit(WRITE, writer, source.as_ptr().addr() as u64, 8);
        // Submits three and waits for three.
        let answer = call(libc::SYS_io_uring_enter, [u64::from(ring.unsigned_abs()), 3, 3, 1, 0, 0])?;
        let first = head.load(Ordering::Relaxed);
        let count = completed.load(Ordering::Acquire).wrapping_sub(first);
        if (answer, count) != (3, 3) {
            return Err(format!("io_uring_enter answered {answer} with {count} completions, not 3 with 3"));
        }
        for at in 0..count {
            let completion = completions as usize + (first.wrapping_add(at) & entry_mask) as usize * 16;
            let (kind, result) = unsafe {
                let completion = rings.add(completion);
                (completion.cast::<u64>().read(), completion.add(8).cast::<i32>().read())
            };
            if result != (if kind == u64::from(TIMEOUT) { -libc::ETIME } else { 8 }) {
                return Err(format!("request {kind} answered {result}"));
            }
        }
        head.store(first.wrapping_add(count), Ordering::Release);
        match target.load(Ordering::Relaxed) {
            found if found == value => Ok(()),
            found => Err(format!("{found:x} was read, and {value:x} written")),
        }
    })
}
