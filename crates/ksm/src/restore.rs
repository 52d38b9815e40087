//! Restores KSM's knobs at the end of a lease.

use super::knob_writer::{KnobWriter, Overridden};
use super::knobs::Knob;
use pagefold_procmem::os::{fault, locked};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// The order in which we restore knobs: the reverse of setting them, except that `run` is first. Once ksmd is stopped,
/// the other knobs have no effect.
const ORDER: [Knob; 7] = [
    Knob::Run,
    Knob::SleepMillisecs,
    Knob::PagesToScan,
    Knob::SmartScan,
    Knob::UseZeroPages,
    Knob::MergeAcrossNodes,
    Knob::MaxPageSharing,
];

/// The result of restoring KSM's knobs. Each knob that we had changed is in one of the lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestoreOutcome {
    /// Knobs that have their original value again, with that value.
    pub restored: Vec<(Knob, u64)>,
    /// Knobs that we can't restore while pages are merged. They stay in the state file for
    /// [`super::lease::restore_deferred`].
    pub deferred: Vec<(Knob, u64)>,
    /// Knobs that another program has changed since. We leave them as they are.
    pub overridden: Vec<Overridden>,
    /// Knobs that the kernel didn't let us restore, and why. They stay in the state file.
    pub failed: Vec<(Knob, String)>,
    /// Knobs that we couldn't restore within the time limit, because ksmd is in a scan. A thread continues; if the
    /// process ends first, the next start continues from the state file.
    pub pending: Vec<(Knob, u64)>,
}

impl RestoreOutcome {
    /// Whether every knob has its original value again, or one that another program has set.
    pub fn is_complete(&self) -> bool {
        self.deferred.is_empty() && self.failed.is_empty() && self.pending.is_empty()
    }
}

/// Restores all changed knobs. A write to `run` blocks until the end of ksmd's batch, which may never come if a program
/// keeps its mmap lock. Nobody can kill a thread that is blocked there, so our process couldn't end either. So we first
/// make ksmd's next batch empty, which never blocks, and write `run` when ksmd rests. If the process ends before that,
/// ksmd does nothing after its batch, and the next start continues from the state file.
pub(crate) fn restore(writer: &Arc<KnobWriter>, limit: Duration) -> RestoreOutcome {
    writer.announce_end();
    let progress = RestoreOutcome { pending: to_restore(writer), ..RestoreOutcome::default() };
    let progress = Arc::new(Mutex::new(progress));
    let (done, wait) = mpsc::channel::<()>();
    let writer = writer.clone();
    let outcome = progress.clone();
    let spawned = std::thread::Builder::new().name("pagefold-ksm-back".to_owned()).spawn(move || {
        restore_all(&writer, &outcome);
        let _ = done.send(());
    });
    match spawned {
        // If the channel is disconnected, the thread has ended, too.
        Ok(_) => drop(wait.recv_timeout(limit)),
        Err(error) => locked(&progress).failed.push((Knob::Run, format!("cannot start a thread: {error}"))),
    }
    locked(&progress).clone()
}

fn restore_all(writer: &KnobWriter, progress: &Mutex<RestoreOutcome>) {
    writer.wait_for_write();
    writer.rest_ksmd();
    for (knob, value) in to_restore(writer) {
        fault::point_of("put-back", knob.file_name());
        let result = restore_one(writer, knob, value);
        fault::point_of("was-put-back", knob.file_name());
        // If this process dies here, the next start finds the remaining knobs in the state file.
        if matches!(result, KnobOutcome::Restored | KnobOutcome::Overridden(_)) {
            writer.forget(knob);
        }
        let mut progress = locked(progress);
        progress.pending.retain(|(pending, _)| *pending != knob);
        match result {
            KnobOutcome::Restored => progress.restored.push((knob, value)),
            KnobOutcome::Deferred => progress.deferred.push((knob, value)),
            KnobOutcome::Overridden(overridden) => progress.overridden.push(overridden),
            KnobOutcome::Failed(why) => progress.failed.push((knob, why)),
        }
    }
    writer.close();
}

/// The knobs that we've changed, in the order of restoring, each with the value to set.
fn to_restore(writer: &KnobWriter) -> Vec<(Knob, u64)> {
    let changed = writer.changed();
    let mut knobs = Vec::new();
    for knob in ORDER {
        if let Some(&original) = changed.get(&knob) {
            knobs.push((knob, final_value(knob, original)));
        }
    }
    knobs
}

/// If `run` was 2 (stopped, all unmerged), we set 0: ksmd is stopped as well, but writing 2 would unmerge everything
/// that we've merged.
fn final_value(knob: Knob, original: u64) -> u64 {
    if knob == Knob::Run && original == 2 { 0 } else { original }
}

enum KnobOutcome {
    Restored,
    Deferred,
    Overridden(Overridden),
    Failed(String),
}

fn restore_one(writer: &KnobWriter, knob: Knob, value: u64) -> KnobOutcome {
    let Some(ours) = writer.expected(knob) else {
        return KnobOutcome::Failed("this kernel does not have the knob any more".to_owned());
    };
    match writer.ksm.read(knob) {
        Ok(Some(found)) if found == value => return KnobOutcome::Restored,
        Ok(Some(found)) if found != ours => return KnobOutcome::Overridden(Overridden { knob, ours, found }),
        Ok(_) => {}
        Err(error) => return KnobOutcome::Failed(error.to_string()),
    }
    match writer.write_original(knob, value) {
        Ok(()) => KnobOutcome::Restored,
        Err(error) if error.is_busy() => KnobOutcome::Deferred,
        Err(error) => KnobOutcome::Failed(error.to_string()),
    }
}
