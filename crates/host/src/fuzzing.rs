//! Private parsers, exposed only for the crate `pagefold-fuzz`, which tests them.

use crate::check::facts;
use crate::scope::{opt_out, opt_out_qemu, opt_out_unit};

/// The opt-out on QEMU's command line. Every file that the command line names has this same text.
pub fn qemu_opts_out(text: &[u8]) -> Option<&'static str> {
    opt_out_qemu::of_arguments(text, |_| Some(text.to_vec()))
}

/// Whether the configuration of a virtual machine of Proxmox VE opts out.
pub fn guest_opts_out(text: &[u8]) -> bool {
    opt_out::guest_denies(text)
}

/// Whether the file of a service opts out.
pub fn service_opts_out(text: &[u8]) -> bool {
    opt_out_unit::memory_ksm(text, "Service") == Some(opt_out_unit::Setting::No)
}

/// The page size in an auxiliary vector.
pub fn page_size(auxv: &[u8]) -> Option<u64> {
    facts::page_size_in(auxv)
}
