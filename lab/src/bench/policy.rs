//! The compared ways to merge: plain KSM and its drivers, UKSM, an oracle, and pagefold.
//!
//! The clock starts once the marks are set. We don't charge the peers for marking, for ksmtuned's programs or for the
//! oracle's reading, but charge pagefold for everything it does.

pub mod ksm;
pub mod ksmtuned;
pub mod pagefold;
pub mod stage;
pub mod uksm;
pub mod uksmd;

pub use ksm::{KsmAdvisor, KsmEverything, KsmPaced, KsmSteered, NoMerging, Oracle};
pub use ksmtuned::Ksmtuned;
pub use pagefold::{Enough, Pagefold};
pub use pagefold_report::policy::{KSM, KSM_EVERYTHING, NO_MERGING, ORACLE, SUBJECT};
pub use stage::{Kernel, Stage};
pub use uksm::GovernedUksm;
pub use uksmd::UksmdRules;

use pagefold_procmem::process::Process;
use std::fmt;

/// A way to merge.
pub trait Policy {
    /// The policy's name in results, unique within an experiment.
    fn name(&self) -> String;

    /// The memory we must mark for it. We don't charge the policy for that.
    fn marks(&self) -> Marks {
        Marks::Everything
    }

    /// Whether it can run on this kernel.
    fn runs_on(&self, kernel: &Kernel) -> bool {
        matches!(kernel, Kernel::Ksm(_))
    }

    /// Marks a program that has started since, as [`Policy::marks`] says.
    fn mark_new(&self, pid: i32) -> anyhow::Result<()> {
        if self.marks() == Marks::Everything {
            ksm::mark_eligible(&Process::open(pid)?)?;
        }
        Ok(())
    }

    /// Merges for the policy's time, or until all is merged. A policy that runs by itself can also have no time: then
    /// `drive` only starts the merging, and it goes on until the stage ends it.
    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()>;
}

impl fmt::Display for dyn Policy + '_ {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.name())
    }
}

/// The memory that we mark for a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// We mark nothing: the policy marks memory by itself, or merges nothing.
    None,
    /// Everything that no rule excludes.
    Everything,
    /// Extents with many duplicates, found by reading all pages.
    Duplicates,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::policy::ksm::KSM_PAGES;
    use pagefold_engine::units::Permyriad;

    #[test]
    fn policies_have_distinct_names() {
        assert_eq!(KsmPaced { pages: KSM_PAGES, seconds: 1 }.name(), KSM);
        let policies: [&dyn Policy; 9] = [
            &Pagefold::new(1),
            &Pagefold::new(1).with(&["--governor", "low"]),
            &KsmSteered { share: Permyriad(250), seconds: 1 },
            &KsmAdvisor { at_cap: false, seconds: 120 },
            &KsmAdvisor { at_cap: true, seconds: 120 },
            &Ksmtuned { always: false, seconds: 120 },
            &Ksmtuned { always: true, seconds: 120 },
            &UksmdRules { seconds: 120 },
            &GovernedUksm { governor: "quiet", seconds: 120 },
        ];
        assert_eq!(
            policies.map(ToString::to_string),
            [
                "pagefold",
                "pagefold --governor low",
                "ksm at 2.50 %",
                "ksm-advisor/120s",
                "ksm-advisor at its cap/120s",
                "ksmtuned/120s",
                "ksmtuned KSM_THRES_COEF=100/120s",
                "uksmd's rules/120s",
                "uksm quiet",
            ]
        );
    }
}
