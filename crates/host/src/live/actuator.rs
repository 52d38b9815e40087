//! Our means to change the machine: the lease of KSM, ksmd's controller and the injector.

use super::{INJECTOR_LIMIT, LiveError};
use pagefold_inject::{InjectError, Injector};
use pagefold_ksm::controller::KsmdController;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::lease::KsmLease;
use pagefold_ksm::{KnobError, RestoreOutcome};
use std::time::Duration;

/// When restoring KSM, how long we wait for ksmd to finish its scan.
const RESTORE_LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(super) struct Actuator {
    lease: KsmLease,
    pub(super) controller: KsmdController,
    /// The process that makes targets call madvise.
    pub(super) injector: Injector,
    /// How many times we've restarted the injector.
    pub(super) restarts: u32,
    /// Whether we no longer drive KSM.
    pub(super) has_stood_down: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KsmControl {
    pub(super) is_ours: bool,
    /// Whether ksmd is still carrying out our last order.
    pub(super) is_busy: bool,
}

/// CPU time that the injector has spent, nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InjectorCost {
    /// The part that the kernel doesn't count as time of ours or of our reaped children.
    pub(super) uncounted_ns: u64,
    pub(super) total_ns: u64,
}

impl Actuator {
    pub(super) fn start(lease: KsmLease, mut injector: Injector) -> Result<Self, LiveError> {
        injector.set_patience(INJECTOR_LIMIT);
        let ksmd = Ksmd::find().map_err(LiveError::Ksmd)?;
        let controller = KsmdController::start(&lease, ksmd).map_err(LiveError::Controller)?;
        Ok(Self { lease, controller, injector, restarts: 0, has_stood_down: false })
    }

    /// Starts the injector again if it has died. Returns whether it had died.
    pub(super) fn tend_injector(&mut self) -> Result<bool, InjectError> {
        let before = self.restarts;
        self.restarts = self.injector.tend()?;
        Ok(self.restarts != before)
    }

    /// Whether we still drive KSM. The error says why we must stop.
    pub(super) fn check_lease(&self) -> Result<KsmControl, String> {
        if self.has_stood_down {
            return Ok(KsmControl::default());
        }
        let status = self.controller.status();
        match self.lease.check() {
            Ok(()) => match status.stood_down {
                Some(why) => Err(why),
                None => Ok(KsmControl { is_ours: true, is_busy: status.under_way }),
            },
            // After an error of the state file or sysfs we also stop giving orders, as if another program had changed
            // KSM.
            Err(error @ (KnobError::Overridden(_) | KnobError::Ksm(_) | KnobError::State(_) | KnobError::Ended)) => {
                Err(error.to_string())
            }
        }
    }

    pub(super) fn injector_cost(&self) -> InjectorCost {
        let total_ns = self.injector.cpu_ns();
        InjectorCost { uncounted_ns: total_ns, total_ns }
    }

    /// The injector's cost as it will be once the injector has ended: if it's our descendant, it's then a reaped child,
    /// whose time the kernel counts.
    pub(super) fn final_injector_cost(&self) -> InjectorCost {
        let total_ns = self.injector.cpu_ns();
        InjectorCost { uncounted_ns: if self.injector.is_descendant() { 0 } else { total_ns }, total_ns }
    }

    /// Stops ksmd, ends the injector and restores KSM.
    pub(super) fn finish(self) -> RestoreOutcome {
        drop(self.injector);
        drop(self.controller);
        self.lease.restore(RESTORE_LIMIT)
    }
}
