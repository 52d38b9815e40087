//! `pagefold doctor --fix`: restores the KSM knobs that an earlier run left changed.

use pagefold_host::check::facts::MachinePaths;
use pagefold_ksm::lease::{KsmPaths, TakeError, restore_deferred, restore_orphaned};
use pagefold_ksm::lock::LockError;
use pagefold_ksm::{Knob, Ksm, KsmError, Overridden, RestoreOutcome};
use pagefold_text::exit::{self, Exit};
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug)]
pub enum Fixed {
    /// No knob was left changed.
    Nothing,
    /// Another pagefold is using KSM.
    InUse(String),
    /// We tried to restore the knobs, with this outcome.
    Done(RestoreOutcome),
}

impl Fixed {
    /// Whether we failed to restore some knobs, or ksmd's scan didn't end in time. Deferred knobs don't count: the
    /// kernel refuses to set them while pages are merged.
    pub fn is_unfinished(&self) -> bool {
        matches!(self, Self::Done(restored) if !restored.failed.is_empty() || !restored.pending.is_empty())
    }

    pub fn lines(&self) -> Vec<String> {
        let restored = match self {
            Self::Nothing => return vec!["no knob to restore".to_owned()],
            Self::InUse(owner) => return vec![format!("no knob restored: {owner}")],
            Self::Done(restored) => restored,
        };
        let mut lines = Vec::new();
        for (knob, value) in &restored.restored {
            lines.push(format!("{knob} restored to {value}"));
        }
        for (knob, value) in &restored.deferred {
            lines.push(format!("{knob} can be set back to {value} only while no page is merged; try again then"));
        }
        for Overridden { knob, found, .. } in &restored.overridden {
            lines.push(format!("{knob} was set to {found} by another program, and stays so"));
        }
        for (knob, value) in &restored.pending {
            lines.push(format!("{knob} cannot be set back to {value} while ksmd is in a scan; try again later"));
        }
        for (knob, why) in &restored.failed {
            lines.push(format!("cannot restore {knob}: {why}"));
        }
        lines
    }

    /// [`Self::lines`] if we've restored a knob, or tried and failed. Otherwise nothing.
    pub fn news(&self) -> Vec<String> {
        match self {
            Self::Done(done) if !done.restored.is_empty() || self.is_unfinished() => self.lines(),
            _ => Vec::new(),
        }
    }

    pub fn json(&self) -> Value {
        match self {
            Self::Nothing => json!({ "done": true, "lines": self.lines() }),
            Self::InUse(owner) => json!({ "done": false, "held_by": owner, "lines": self.lines() }),
            Self::Done(restored) => {
                let overridden = restored.overridden.iter().map(|other| (other.knob, other.found));
                json!({
                    "done": restored.is_complete(),
                    "put_back": values(restored.restored.iter().copied()),
                    "deferred": values(restored.deferred.iter().copied()),
                    "pending": values(restored.pending.iter().copied()),
                    "left": values(overridden),
                    "failed": restored.failed.iter().map(|(knob, why)| json!({ "knob": knob, "why": why })).collect::<Value>(),
                    "lines": self.lines(),
                })
            }
        }
    }
}

fn values(knobs: impl Iterator<Item = (Knob, u64)>) -> Value {
    knobs.map(|(knob, value)| json!({ "knob": knob, "value": value })).collect()
}

/// Restores the knobs.
///
/// # Errors
/// We can't read KSM or the state file. The exit code is 3 if we aren't root.
pub fn fix(roots: &MachinePaths) -> anyhow::Result<Fixed> {
    let ksm = match Ksm::open(&roots.sys.join("kernel/mm/ksm")) {
        Ok(ksm) => Arc::new(ksm),
        // Without KSM no knob can have been changed. The findings report that KSM is missing.
        Err(KsmError::Absent { .. }) => return Ok(Fixed::Nothing),
        Err(error) => return Err(error.into()),
    };
    let paths = KsmPaths { lock: roots.lock.clone(), state: roots.state.clone(), proc_root: roots.proc.clone() };
    let restored = match restore_deferred(&ksm, &paths) {
        Ok(None) => restore_orphaned(&ksm, &paths),
        other => other,
    };
    match restored {
        Ok(None) => Ok(Fixed::Nothing),
        Ok(Some(restored)) => Ok(Fixed::Done(restored)),
        Err(held @ (TakeError::Lock(LockError::Held { .. }) | TakeError::Busy { .. })) => {
            Ok(Fixed::InUse(held.to_string()))
        }
        Err(denied @ TakeError::Lock(LockError::Denied { .. })) => {
            Err(Exit::new(exit::NOT_PERMITTED, format!("{denied}; run as root")).into())
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_result_of_a_fix_is_shown() {
        let restored = RestoreOutcome {
            restored: vec![(Knob::Run, 0)],
            deferred: vec![(Knob::MaxPageSharing, 256)],
            overridden: vec![Overridden { knob: Knob::PagesToScan, ours: 1, found: 2 }],
            failed: vec![(Knob::SmartScan, "refused".into())],
            pending: vec![(Knob::SleepMillisecs, 20)],
        };
        let fixed = Fixed::Done(restored);
        let text = fixed.lines().join("\n");
        for part in [
            "run restored to 0",
            "max_page_sharing can be set back to 256",
            "pages_to_scan was set to 2",
            "cannot restore smart_scan",
            "sleep_millisecs cannot be set back to 20",
        ] {
            assert!(text.contains(part), "{part}");
        }
        assert!(fixed.is_unfinished());
        assert_eq!(fixed.json()["deferred"], json!([{ "knob": "max_page_sharing", "value": 256 }]));
    }
}
