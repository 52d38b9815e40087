//! Everything in pagefold that touches the machine. The only crate with unsafe code.
//!
//! | folder | what belongs there |
//! | --- | --- |
//! | [`os`] | the machine and this process: CPU time, memory pressure and nodes, capabilities, signals, fault injection |
//! | [`proc`] | another process as procfs shows it: status, mappings, page flags, content, cgroup limits |
//! | [`ksm`] | KSM: its counters and knobs, taking it over and giving it back, ordering scans from ksmd |
//! | [`inject`] | making another process call `madvise`, by ptrace; unmerging through it |
//! | [`scope`] | which processes are in scope, which of them and of their mappings are excluded, trust domains |
//! | [`host`] | all of it behind the core's `Host` interface: regions, samples, marks, moves |
//! | [`check`] | whether this machine is fit for pagefold (`pagefold doctor`) |
//!
//! A folder uses those above it only; `host` and `check` stand beside each other.
//!
//! - A new rule for what is excluded: [`scope::exclude`].
//! - A new knob of KSM: [`ksm::Knob`], and its value in force in [`ksm::lease`].
//! - A new figure from `/proc/PID`: the module of its file in [`proc`].
//! - A new finding of `pagefold doctor`: the fact in [`check::facts`], its meaning in [`check::diagnose`].

pub mod check;
#[doc(hidden)]
pub mod fuzzing;
pub mod host;
pub mod inject;
pub mod ksm;
pub mod os;
pub mod proc;
pub mod scope;
