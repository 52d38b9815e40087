//! Records over time how much KSM saves and how much ksmd and a daemon spend, whoever controls KSM.

use crate::bench::daemon::Meter;
use crate::bench::events::EventReader;
use crate::bench::policy::uksm::Uksm;
use crate::bench::sampling::SamplingThread;
use anyhow::Context;
use pagefold_engine::units::Bytes;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::{KSM_ROOT, Ksm};
pub use pagefold_report::points::{SamplerPoint, largest_share, spent_between};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time between two samples. A sample takes twelve small reads, and as many again with a daemon.
const INTERVAL: Duration = Duration::from_millis(50);

/// Samples KSM and a daemon until we stop it.
#[derive(Debug)]
pub struct Sampler {
    shared: Arc<Mutex<Shared>>,
    thread: SamplingThread<SamplerPoint>,
}

/// The daemon that the thread measures, and its latest sample.
#[derive(Debug, Default)]
struct Shared {
    daemon: Option<Meter>,
    last: SamplerPoint,
}

impl Sampler {
    pub fn start() -> anyhow::Result<Self> {
        let ksm = Ksm::open(Path::new(KSM_ROOT))?;
        Self::watching(Ksmd::find()?.context("ksmd is not running")?, move || {
            Ok(ksm.counters()?.view(true, false).saved().bytes())
        })
    }

    /// The same on a kernel with UKSM instead of KSM.
    pub fn start_uksm(uksm: Uksm) -> anyhow::Result<Self> {
        let uksmd = Ksmd::find_named(Path::new("/proc"), b"uksmd")?.context("uksmd is not running")?;
        Self::watching(uksmd, move || uksm.saved())
    }

    fn watching(ksmd: Ksmd, saved: impl Fn() -> anyhow::Result<Bytes> + Send + 'static) -> anyhow::Result<Self> {
        let saved_and_cpu_ns = move || anyhow::Ok((saved()?.0, ksmd.cpu_ns()?));
        let shared = Arc::new(Mutex::new(Shared::default()));
        let for_thread = Arc::clone(&shared);
        let (saved_then, cpu_then) = saved_and_cpu_ns()?;
        let events = EventReader::open(Path::new("/proc/vmstat"))?;
        let events_then = events.read()?;
        let thread = SamplingThread::start(INTERVAL, move |began| {
            let (saved, cpu_ns) = saved_and_cpu_ns()?;
            let events = events.read()?.since(events_then);
            let mut shared = for_thread.lock().unwrap_or_else(PoisonError::into_inner);
            shared.last = SamplerPoint {
                seconds: began.elapsed().as_secs_f64(),
                saved_bytes: saved.saturating_sub(saved_then),
                ksmd_seconds: Duration::from_nanos(cpu_ns.saturating_sub(cpu_then)).as_secs_f64(),
                daemon_seconds: shared.daemon.as_mut().map_or(0.0, Meter::cpu_seconds),
                daemon_peak_bytes: shared.daemon.as_mut().map_or(0, Meter::peak_bytes),
                events,
            };
            Ok(shared.last)
        });
        Ok(Self { shared, thread })
    }

    /// Also measures the CPU time and memory of this daemon from now on.
    pub fn watch(&self, daemon: Meter) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).daemon = Some(daemon);
    }

    pub fn last(&self) -> SamplerPoint {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).last
    }

    /// Takes a last sample and returns all of them (at least one).
    pub fn finish(self) -> anyhow::Result<Vec<SamplerPoint>> {
        self.thread.finish()
    }
}
