//! The short files below `/proc/PID`.

use pagefold_host::scope::opt_out::guest_denies;
use pagefold_host::scope::opt_out_qemu::of_arguments;
use pagefold_host::scope::opt_out_unit::{Setting, memory_ksm};
use pagefold_inject::fuzzing::{Activity, fitness};
use pagefold_ksm::ksmd::parse_schedstat;
use pagefold_procmem::process::Stat;
use pagefold_procmem::statm::Sizes;
use pagefold_procmem::status::{Status, program_name};
use pagefold_text::escape::printable;
use std::path::Path;

/// `/proc/PID/stat`: the name is the text between the first and the last parenthesis, and the other fields parse back.
pub fn stat(text: &[u8]) {
    let Ok(stat) = Stat::parse(text) else { return };
    assert!(stat.state.is_ascii_alphabetic());
    let open = text.iter().position(|&byte| byte == b'(').unwrap_or(0);
    assert!(text[open + 1..].starts_with(&stat.comm));
    let flags = u64::from(stat.kernel_thread) << 21 | u64::from(stat.only_forked) << 6;
    let rest = format!(
        ") {} {} 7 7 0 -1 {flags} 0 0 0 0 {} {} 0 0 20 {} {} 0 {} 0 0\n",
        char::from(stat.state),
        stat.parent,
        stat.cpu_ticks - stat.system_ticks,
        stat.system_ticks,
        stat.nice,
        stat.threads,
        stat.start_time_ticks
    );
    let printed = [b"7 (", stat.comm.as_slice(), rest.as_bytes()].concat();
    assert_eq!(Stat::parse(&printed), Ok(stat));
}

/// `/proc/PID/status`: prints and parses back, and other lines make no difference.
pub fn status(text: &[u8]) {
    assert_safe(text);
    let Ok(status) = Status::parse(text) else { return };
    let four = |ids: [u32; 4]| ids.map(|id| id.to_string()).join("\t");
    let printed = format!(
        "Name:\tx\\nTgid:\t1\nTgid:\t{}\nTracerPid:\t{}\nUid:\t{}\nGid:\t{}\nVmLck:\t{} kB\nVmPin:\t{} kB\nCapPrm:\t{:016x}\nThreads:\t1\n",
        status.thread_group,
        status.tracer,
        four(status.uids),
        four(status.gids),
        status.locked_kib,
        status.pinned_kib,
        status.permitted
    );
    assert_eq!(Status::parse(printed.as_bytes()).as_ref(), Ok(&status));
    assert_eq!(Status::parse(&[b"Name:\tx\n", text].concat()), Ok(status));
}

/// Printed names contain no control characters, and escaping is idempotent.
fn assert_safe(name: &[u8]) {
    let safe = printable(name);
    assert!(!safe.contains(char::is_control), "{safe:?}");
    assert_eq!(printable(safe.as_bytes()), safe);
    assert_eq!(program_name(Some(Path::new("/")), name), name);
}

/// `/proc/PID/statm`: prints and parses back.
pub fn statm(text: &[u8]) {
    let Ok(sizes) = Sizes::parse(text) else { return };
    let Sizes { mapped, resident, data } = sizes;
    assert_eq!(Sizes::parse(format!("{mapped} {resident} 1 2 3 {data} 0\n").as_bytes()), Ok(sizes));
}

/// `/proc/PID/task/TID/syscall`: prints and parses back, and we choose only threads that run, sleep or are stopped by
/// job control for injection.
pub fn syscall(text: &[u8]) {
    let Ok(activity) = Activity::parse(text) else { return };
    for state in [b'R', b'S', b'T', b'D', b'Z', b'X', b't', b'I', b'P'] {
        assert!(fitness(state, activity).is_none() || matches!(state, b'R' | b'S' | b'T'));
    }
    let printed = match activity {
        Activity::Running => "running\n".to_owned(),
        Activity::Blocked => "-1 0x7ffd0000 0x401000\n".to_owned(),
        Activity::Syscall { nr, args, pc } => {
            assert!(nr >= 0);
            let args = args.map(|arg| format!("0x{arg:x}")).join(" ");
            format!("{nr} {args} 0x7ffd0000 0x{pc:x}\n")
        }
    };
    assert_eq!(Activity::parse(printed.as_bytes()), Ok(activity));
}

/// Command lines and files that opt a program out: the last word counts, whatever precedes it.
pub fn opt_outs(text: &[u8]) {
    let machine = "-machine mem-merge=off";
    let then = |more: &[u8]| [text, more].concat();
    // Every file that the command line names has the text of the command line.
    let of_qemu = |arguments: Vec<u8>| of_arguments(&arguments, |_| Some(arguments.clone()));
    let of_service = |file: Vec<u8>| memory_ksm(&file, "Service");
    assert_eq!(of_qemu(then(b"\0x\0x\0-M\0pc,mem-merge=off")), Some(machine));
    assert_ne!(of_qemu(then(b"\0x\0x\0-M\0pc,mem-merge=on")), Some(machine));
    assert_eq!(of_service(then(b"\n\n[Service]\nMemoryKSM=no\n")), Some(Setting::No));
    assert_ne!(of_service(then(b"\n\n[Service]\nMemoryKSM=yes\n")), Some(Setting::No));
    assert!(guest_denies(&[b"allow-ksm: 0\n[snapshot]\n", text].concat()));
    let _ = guest_denies(text);
}

/// `/proc/PID/schedstat`: the first number.
pub fn schedstat(text: &[u8]) {
    let Some(ns) = parse_schedstat(text) else { return };
    assert_eq!(parse_schedstat(format!("{ns} 5 6\n").as_bytes()), Some(ns));
}
