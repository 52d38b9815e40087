//! Gives programs back the huge pages that they had before we marked their memory. We do that only where we unmark
//! memory because its merged pages are soon written.

use super::LiveHost;
use pagefold_engine::host::{Change, Marking, Outcome, Why};
use pagefold_procmem::collapse::{collapse, is_wanted};

impl LiveHost {
    /// Collapses some of the memory that we unmarked in this cycle or an earlier one into huge pages.
    pub(super) fn collapse(&mut self, outcome: &mut Outcome) {
        if self.actuator.is_none() {
            return;
        }
        for result in &outcome.unmarked {
            let Change { span, why } = result.change;
            if !matches!((why, result.marking), (Why::CowBroken { .. }, Marking::Done(_))) {
                continue;
            }
            let Some(pid) = self.regions.pids.get(&span.region) else { continue };
            if let Some(target) = self.targets.get_mut(pid) {
                target.huge.wanted(span.first.address(), (span.first + span.pages.0).address());
            }
        }
        // We collapse in one process per cycle, in turn.
        let from = self.next_collapse;
        let mut in_turn = self.targets.range(from..).chain(self.targets.range(..from));
        let Some((&pid, _)) = in_turn.find(|(_, target)| target.huge.is_waiting()) else { return };
        self.next_collapse = pid.saturating_add(1);
        let Some(target) = self.targets.get_mut(&pid) else { return };
        let next = target.huge.next();
        let roots = self.rules.roots.clone();
        if target.may_be_read() && is_wanted() {
            outcome.collapsed += target.read(move |process| collapse(process, &next, &roots)).unwrap_or(0);
        }
    }
}
