//! The machine as a whole: KSM's counters, memory and its pressure, and the CPU time that merging costs.

use super::LiveError;
use super::actuator::{InjectorCost, KsmControl};
use pagefold_engine::host::{Cost, KsmView, MemoryView};
use pagefold_engine::units::Pages;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::{Ksm, VmEventCounter, VmEvents};
use pagefold_procmem::os::cpu::own_and_children_cpu_ns;
use pagefold_procmem::os::pressure::{MemoryMonitor, PressureError};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Time between two reads of the memory pressure, nanoseconds.
const MEMORY_NS: u64 = 1_000_000_000;

#[derive(Debug)]
pub(super) struct MachineMonitor {
    ksm: Arc<Ksm>,
    monitor: MemoryMonitor,
    pub(super) memory: MemoryView,
    event_counter: VmEventCounter,
    vm_events: VmEvents,
    /// Pages of zeros that KSM has merged into the kernel's zero page, on the whole machine.
    pub(super) zeros: Pages,
    next_memory_ns: u64,
}

impl MachineMonitor {
    pub(super) fn open(ksm: Arc<Ksm>, proc: &Path) -> Result<Self, PressureError> {
        let event_counter = VmEventCounter::open(proc);
        let vm_events = event_counter.read().unwrap_or_default();
        Ok(Self {
            ksm,
            monitor: MemoryMonitor::open(proc)?,
            memory: MemoryView::default(),
            event_counter,
            vm_events,
            zeros: Pages(0),
            next_memory_ns: 0,
        })
    }

    /// Reads KSM's counters and, once a second, the state of the memory.
    pub(super) fn read(&mut self, now_ns: u64, control: KsmControl) -> Result<KsmView, LiveError> {
        let mut ksm = self.ksm.counters()?.view(control.is_ours, control.is_busy);
        if now_ns >= self.next_memory_ns {
            self.next_memory_ns = now_ns + MEMORY_NS;
            self.memory = self.monitor.read()?;
            if ksm.shared > Pages(0) {
                // If we can't read the counts, we keep the old ones. If we took zeros, the next counts would look like
                // a burst of copies.
                self.vm_events = self.event_counter.read().unwrap_or(self.vm_events);
            }
        }
        self.zeros = ksm.zero;
        ksm.broken = self.vm_events.copies;
        ksm.splits = self.vm_events.splits;
        Ok(ksm)
    }

    /// KSM's counters now, whether or not we drive KSM. `None` if we can't read them.
    pub(super) fn ksm_view(&self) -> Option<KsmView> {
        Some(self.ksm.counters().ok()?.view(false, false))
    }
}

/// The clock of the run, and the CPU time spent since the run began.
#[derive(Debug)]
pub(super) struct CostMeter {
    began: Instant,
    ksmd: Option<Ksmd>,
    /// ksmd's CPU time when the run began, and as last read.
    first_ksmd_ns: u64,
    last_ksmd_ns: u64,
}

impl CostMeter {
    pub(super) fn start(ksmd: Option<Ksmd>) -> Self {
        let mut meter = Self { began: Instant::now(), ksmd, first_ksmd_ns: 0, last_ksmd_ns: 0 };
        meter.first_ksmd_ns = meter.ksmd_ns().unwrap_or(0);
        meter.last_ksmd_ns = meter.first_ksmd_ns;
        meter
    }

    /// Nanoseconds since the run began.
    pub(super) fn now_ns(&self) -> u64 {
        elapsed_ns(self.began)
    }

    pub(super) fn read(&mut self, injector: InjectorCost) -> Cost {
        // ksmd never ends. If we can't read its clock, we keep the last value.
        self.last_ksmd_ns = self.ksmd_ns().unwrap_or(self.last_ksmd_ns);
        Cost {
            pagefold_ns: own_and_children_cpu_ns() + injector.uncounted_ns,
            injector_ns: injector.total_ns,
            ksmd_ns: self.last_ksmd_ns.saturating_sub(self.first_ksmd_ns),
        }
    }

    pub(super) fn ksmd_ns(&self) -> Option<u64> {
        self.ksmd.as_ref()?.cpu_ns().ok()
    }
}

pub(super) fn elapsed_ns(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
