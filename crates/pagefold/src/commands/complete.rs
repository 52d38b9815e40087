//! `pagefold complete`: the names that shells complete after `--unit`, `--vm`, `--container` and `--pod`.

use anyhow::Result;
use pagefold_host::scope::workload::{WorkloadKind, running};
use pagefold_procmem::Roots;
use pagefold_text::exit;
use pagefold_text::style::{self, Lines};

/// Prints the names of running workloads of a kind, one a line.
///
/// Users can choose the names of cgroups, and bash evaluates completions. So we leave out names with characters that
/// are special to a shell.
pub fn run(kind: &str) -> Result<u8> {
    let mut text = String::new();
    if let Some(kind) = WorkloadKind::of_name(kind) {
        for name in running(kind, &Roots::default().proc) {
            if is_plain(&name) {
                text.line(name);
            }
        }
    }
    style::print(&text)?;
    Ok(exit::OK)
}

fn is_plain(name: &str) -> bool {
    !name.starts_with('-') && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"@:._/-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_means_anything_to_a_shell() {
        for name in ["nginx.service", "getty@tty1.service", "web-1", "3f0c1d2e9a7b"] {
            assert!(is_plain(name), "{name}");
        }
        for name in ["$(reboot).service", "a b", "`x`", "a;b", "-x", "a\\x2db", "a\nb", "*"] {
            assert!(!is_plain(name), "{name}");
        }
    }
}
