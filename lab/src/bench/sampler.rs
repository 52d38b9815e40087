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

    /// Starts to sample on a kernel with UKSM instead of KSM.
    pub fn start_uksm(uksm: Uksm) -> anyhow::Result<Self> {
        let uksmd = Ksmd::find_named(Path::new("/proc"), b"uksmd")?.context("uksmd is not running")?;
        Self::watching(uksmd, move || uksm.saved())
    }

    fn watching(ksmd: Ksmd, saved: impl Fn() -> anyhow::Result<Bytes> + Send + 'static) -> anyhow::Result<Self> {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let for_thread = Arc::clone(&shared);
        let saved_then = saved()?.0;
        let cpu_then = ksmd.cpu_ns()?;
        let events = EventReader::open(Path::new("/proc/vmstat"))?;
        let events_then = events.read()?;
        let thread = SamplingThread::start(INTERVAL, move |began| {
            let saved_bytes = saved()?.0.saturating_sub(saved_then);
            let ksmd_time = Duration::from_nanos(ksmd.cpu_ns()?.saturating_sub(cpu_then));
            let events = events.read()?.since(events_then);
            let mut shared = for_thread.lock().unwrap_or_else(PoisonError::into_inner);
            let mut point = SamplerPoint {
                seconds: began.elapsed().as_secs_f64(),
                saved_bytes,
                ksmd_seconds: ksmd_time.as_secs_f64(),
                events,
                ..SamplerPoint::default()
            };
            if let Some(daemon) = &mut shared.daemon {
                daemon.read();
                point.daemon_seconds = daemon.cpu_seconds();
                point.daemon_peak_bytes = daemon.peak_bytes();
            }
            shared.last = point;
            Ok(point)
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
