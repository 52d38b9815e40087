//! Runs every target on the inputs that fuzzing found, and on long inputs.

use pagefold_fuzz::{TARGETS, Target};
use pagefold_procmem::os::cpu::own_cpu_ns;
use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::Duration;

const FUZZ_DIR: &str = env!("CARGO_MANIFEST_DIR");

fn inputs(target: &str) -> Vec<PathBuf> {
    files(&Path::new(FUZZ_DIR).join("corpus").join(target))
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn the_properties_hold_for_every_input_found_so_far() {
    let mut broken = Vec::new();
    for (name, target) in TARGETS {
        let inputs = inputs(name);
        assert!(inputs.len() >= 3, "{name} has only {} inputs", inputs.len());
        for input in inputs {
            let bytes = fs::read(&input).unwrap();
            if catch_unwind(|| target(&bytes)).is_err() {
                broken.push(input);
            }
        }
    }
    assert!(broken.is_empty(), "broken by {broken:#?}");
}

#[test]
fn every_target_has_a_fuzz_target_and_inputs() {
    let wanted: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let names = |dir: &str| -> BTreeSet<String> {
        let stem = |path: PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
        files(&Path::new(FUZZ_DIR).join(dir)).into_iter().map(stem).collect()
    };
    assert_eq!(names("fuzz_targets"), wanted);
    assert_eq!(names("corpus"), wanted);
    let manifest = fs::read_to_string(Path::new(FUZZ_DIR).join("Cargo.toml")).unwrap();
    assert!(wanted.iter().all(|name| manifest.contains(&format!("name = \"{name}\""))));
}

/// As many mappings as the kernel allows by default, each a separate region.
fn mappings(counters: bool) -> Vec<u8> {
    let more = if counters { "Anonymous: 4 kB\nVmFlags: rd wr\n" } else { "" };
    let one = |at: u64| format!("{:x}000-{:x}000 rw-p 0 00:00 0 \n{more}", 2 * at, 2 * at + 1);
    (1..65_530).map(one).collect::<Vec<_>>().concat().into_bytes()
}

/// One MiB of every input repeated, and as one line; and a process with very many mappings.
#[test]
fn parsing_time_is_not_quadratic() {
    const MIB: usize = 1 << 20;
    // CPU time, which includes the other tests here. Measured: 1.5 s at most, for 65,529 mappings in smaps. Quadratic
    // time would be minutes.
    const LIMIT: Duration = Duration::from_secs(10);
    let timed = |name: &str, target: Target, text: &[u8]| {
        let start_ns = own_cpu_ns();
        target(text);
        let taken = Duration::from_nanos(own_cpu_ns() - start_ns);
        assert!(taken < LIMIT, "{name} took {taken:?}");
        taken
    };
    for (name, target) in TARGETS {
        let texts = inputs(name).into_iter().map(|path| fs::read(path).unwrap());
        let largest = texts.max_by_key(Vec::len).unwrap();
        let again: Vec<u8> = largest.iter().copied().cycle().take(MIB).collect();
        let line: Vec<u8> = again.iter().map(|&byte| if byte == b'\n' { b' ' } else { byte }).collect();
        let taken = [again, line, mappings(name == "smaps"), vec![b'9'; MIB], vec![b'['; MIB]]
            .map(|text| timed(name, target, &text));
        println!("{name}: {taken:?}");
    }
}
