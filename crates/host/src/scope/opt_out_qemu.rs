//! The opt-out on QEMU's command line: `mem-merge=off` of the machine, or `merge=off` of a part of its memory.
//!
//! Syntax: QEMU's qemu-options.hx and util/keyval.c. An option has one dash or two, and its value is the next argument.
//! In the value, commas separate settings, and a doubled comma belongs to a setting's text. The last setting of a key
//! counts. Keys may be written with underscores. A switch is off by `off`, `no`, `n` or `false`, or, before QEMU 6.0,
//! by a `no` before its name.
//!
//! A process runs QEMU if its executable is named like QEMU's. Any program may have such a name, which can only keep it
//! from being merged. The command line is memory of the process, which may have rewritten it, so we read it once after
//! each exec, and only in part if it's long.

use crate::scope::opt_out::read_roots_file;
use pagefold_procmem::os::abandonable::run_abandonable;
use pagefold_procmem::process::{Process, ReadError};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// We read at most this much of a command line. libvirt's have some tens of kilobytes.
const ARGUMENTS_MOST: u64 = 256 << 10;
/// We read at most this much of a file named by `-readconfig`, and at most this many of them.
const CONFIG_MOST: u64 = 64 << 10;
const CONFIGS_MOST: usize = 16;

const MACHINE: &str = "-machine mem-merge=off";
const OBJECT: &str = "-object merge=off";

/// Whether a program of this name is QEMU.
pub(crate) fn is_qemu(program: &[u8]) -> bool {
    program.starts_with(b"qemu-system-") || [&b"kvm"[..], b"qemu-kvm", b"qemu"].contains(&program)
}

/// The opt-out on the command line of a process. May block on the process.
pub(crate) fn of_process(process: &Process) -> Result<Option<&'static str>, ReadError> {
    let mut arguments = Vec::new();
    process.read_pieces("cmdline", ARGUMENTS_MOST, |piece| arguments.extend_from_slice(piece))?;
    Ok(of_arguments(&arguments, |path| read_roots_file(path, CONFIG_MOST)))
}

/// Like [`of_process`], but without blocking for long.
pub(crate) fn of_process_in_time(process: &Arc<Process>) -> Result<Option<&'static str>, ReadError> {
    // The thread that we may abandon needs its own reference.
    let same = process.clone();
    run_abandonable(move || of_process(&same)).unwrap_or_else(|_| {
        let late = io::Error::new(io::ErrorKind::TimedOut, "it does not answer");
        Err(ReadError::from_io(process.pid(), "cmdline", late))
    })
}

/// The opt-out on a command line as /proc shows it: arguments that end with a NUL byte. `read_config` reads a file.
pub fn of_arguments(arguments: &[u8], mut read_config: impl FnMut(&Path) -> Option<Vec<u8>>) -> Option<&'static str> {
    let mut settings = Settings::default();
    let mut configs = 0;
    let mut words = arguments.split(|&byte| byte == 0).peekable();
    while let Some(word) = words.next() {
        let Some(name) = word.strip_prefix(b"-") else { continue };
        let Some(&value) = words.peek() else { break };
        match name.strip_prefix(b"-").unwrap_or(name) {
            b"machine" | b"M" => settings.machine(value),
            b"object" => settings.object(value),
            b"set" => settings.set(value),
            b"readconfig" if configs < CONFIGS_MOST => {
                configs += 1;
                // A relative path depends on a directory of the process, which root doesn't choose.
                let path = Path::new(OsStr::from_bytes(value));
                if path.is_absolute() {
                    settings.config(&read_config(path).unwrap_or_default());
                }
            }
            _ => continue,
        }
        words.next();
    }
    settings.opt_out()
}

#[derive(Default)]
struct Settings {
    machine: Option<bool>,
    /// Whether each memory object may be merged, by its ID.
    objects: BTreeMap<Vec<u8>, bool>,
}

impl Settings {
    fn machine(&mut self, value: &[u8]) {
        for (key, value) in pairs(value) {
            self.machine_key(&key, &value);
        }
    }

    fn machine_key(&mut self, key: &[u8], value: &[u8]) {
        if key == b"mem-merge" {
            self.machine = switch(value).or(self.machine);
        }
    }

    fn object(&mut self, value: &[u8]) {
        #[derive(Deserialize)]
        struct Object {
            #[serde(default)]
            id: String,
            merge: Option<bool>,
        }
        if value.starts_with(b"{") {
            if let Ok(Object { id, merge: Some(merge) }) = serde_json::from_slice(value) {
                self.objects.insert(id.into_bytes(), merge);
            }
            return;
        }
        let mut id = Vec::new();
        let mut merge = None;
        for (key, value) in pairs(value) {
            match key.as_slice() {
                b"id" => id = value,
                b"merge" => merge = switch(&value).or(merge),
                _ => {}
            }
        }
        self.set_object(&id, merge);
    }

    fn set_object(&mut self, id: &[u8], merge: Option<bool>) {
        if let Some(merge) = merge {
            self.objects.insert(id.to_vec(), merge);
        }
    }

    /// `-set object.ID.merge=off`.
    fn set(&mut self, text: &[u8]) {
        let Some((name, value)) = split_at_first(text, b'=') else { return };
        let Some(name) = name.strip_prefix(b"object.") else { return };
        let Some(id) = name.strip_suffix(b".merge") else { return };
        self.set_object(id, switch(value));
    }

    /// A file with sections: `[machine]`, `[object "ID"]`.
    fn config(&mut self, text: &[u8]) {
        let mut section = &b""[..];
        for line in text.split(|&byte| byte == b'\n') {
            let line = line.trim_ascii();
            if let [b'[', name @ .., b']'] = line {
                section = name.trim_ascii();
                continue;
            }
            let Some((key, value)) = split_at_first(line, b'=') else { continue };
            let Some(value) = unquoted(value) else { continue };
            let key = dashed(key.trim_ascii());
            if section == b"machine" {
                self.machine_key(&key, value);
            } else if key == b"merge" {
                if let Some(id) = section.strip_prefix(b"object").and_then(unquoted) {
                    self.set_object(id, switch(value));
                }
            }
        }
    }

    /// The setting of `-machine` is the default for each `-object`. A single object with `merge=off` opts the whole
    /// process out, because we can't identify its mapping.
    fn opt_out(&self) -> Option<&'static str> {
        if self.machine == Some(false) {
            Some(MACHINE)
        } else if self.objects.values().any(|merge| !merge) {
            Some(OBJECT)
        } else {
            None
        }
    }
}

/// The settings in the value of an option. A key without a value is a switch that is on, or off after `no`.
fn pairs(text: &[u8]) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest.take()?;
        let mut setting = Vec::new();
        let mut at = 0;
        while let Some(&byte) = text.get(at) {
            if byte == b',' {
                if text.get(at + 1) != Some(&b',') {
                    rest = Some(&text[at + 1..]);
                    break;
                }
                at += 1;
            }
            setting.push(byte);
            at += 1;
        }
        Some(match split_at_first(&setting, b'=') {
            Some((key, value)) => (dashed(key), value.to_vec()),
            None => match setting.strip_prefix(b"no") {
                Some(key) => (dashed(key), b"off".to_vec()),
                None => (dashed(&setting), b"on".to_vec()),
            },
        })
    })
}

fn unquoted(text: &[u8]) -> Option<&[u8]> {
    match text.trim_ascii() {
        [b'"', inner @ .., b'"'] => Some(inner),
        _ => None,
    }
}

fn dashed(key: &[u8]) -> Vec<u8> {
    key.iter().map(|&byte| if byte == b'_' { b'-' } else { byte }).collect()
}

fn switch(value: &[u8]) -> Option<bool> {
    match value {
        b"on" | b"yes" | b"y" | b"true" => Some(true),
        b"off" | b"no" | b"n" | b"false" => Some(false),
        // QEMU doesn't start with any other value.
        _ => None,
    }
}

fn split_at_first(text: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|&byte| byte == separator)?;
    Some((&text[..at], &text[at + 1..]))
}
