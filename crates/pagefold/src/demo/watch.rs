//! A thread that reads KSM's counters while pages are merged, and draws them.

use super::picture::Canvas;
use super::workers::proportional_bytes;
use anyhow::{Context, Result};
use pagefold_ksm::Ksm;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_procmem::os::cpu::own_and_children_cpu_ns;
use pagefold_procmem::process::Process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between two readings of the counters.
const INTERVAL: Duration = Duration::from_millis(50);
/// We draw a picture after this many readings. If we can't redraw pictures, we print a line of text, less often.
const READINGS_PER_PICTURE: u32 = 4;
const READINGS_PER_LINE: u32 = 40;

/// One reading of the counters and clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    pub seconds: f64,
    /// Bytes saved since the start, by KSM's counters.
    pub saved: u64,
    /// CPU time of this process since the start, without this thread's.
    pub own_cpu: Duration,
    /// CPU time of ksmd since the start.
    pub ksmd_cpu: Duration,
}

impl Point {
    pub fn cpu(&self) -> Duration {
        self.own_cpu + self.ksmd_cpu
    }
}

#[derive(Debug)]
pub struct View<'a> {
    /// The readings so far, at least one.
    pub points: &'a [Point],
    /// Memory of each worker in bytes.
    pub workers: &'a [u64],
    /// Whether to draw only a line, because we can't redraw a picture.
    pub line: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// The readings, at least one.
    pub points: Vec<Point>,
    /// Memory of each worker at the end, in bytes.
    pub workers: Vec<u64>,
    /// CPU time of reading and drawing.
    pub display_cpu: Duration,
}

impl Observed {
    pub fn last(&self) -> Point {
        self.points.last().copied().unwrap_or_default()
    }
}

#[derive(Debug)]
pub struct Watch {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Observed>>>,
}

impl Watch {
    /// Starts the thread, which counts time and costs from now on and reads the memory of `pids` for every picture.
    pub fn start(
        ksm: Arc<Ksm>,
        pids: &[i32],
        mut picture: impl FnMut(&View<'_>) -> Vec<String> + Send + 'static,
    ) -> Result<Self> {
        let ksmd = Ksmd::find()?.context("ksmd is not found: this pid namespace hides it")?;
        let processes = pids.iter().map(|&pid| Process::open(pid)).collect::<Result<Vec<_>, _>>()?;
        let end = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&end);
        let mut meters = Meters::open(ksm, ksmd)?;
        let thread = std::thread::spawn(move || {
            let mut canvas = Canvas::new();
            let per_picture = if canvas.is_live() { READINGS_PER_PICTURE } else { READINGS_PER_LINE };
            let mut observed = Observed::default();
            for reading in 0.. {
                let last = ended.load(Ordering::Acquire);
                observed.points.push(meters.read()?);
                if last || reading % per_picture == 0 {
                    observed.workers = processes.iter().map(proportional_bytes).collect::<Result<_, _>>()?;
                    let line = !canvas.is_live() && !last;
                    canvas.draw(&picture(&View { points: &observed.points, workers: &observed.workers, line }));
                }
                if last {
                    break;
                }
                std::thread::park_timeout(INTERVAL);
            }
            observed.display_cpu = thread_cpu();
            Ok(observed)
        });
        Ok(Self { end, thread: Some(thread) })
    }

    /// Takes the last reading, draws the last picture, and returns all readings.
    pub fn finish(mut self) -> Result<Observed> {
        self.end().unwrap_or_else(|| Ok(Observed::default()))
    }

    fn end(&mut self) -> Option<Result<Observed>> {
        self.end.store(true, Ordering::Release);
        let thread = self.thread.take()?;
        thread.thread().unpark();
        Some(thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the thread that draws the progress panicked"))))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // We wait for the thread, so that it shows the cursor again before anybody prints anything else.
        self.end();
    }
}

/// The counters and clocks, and their values at the start.
struct Meters {
    ksm: Arc<Ksm>,
    ksmd: Ksmd,
    began: Instant,
    saved: u64,
    own_ns: u64,
    ksmd_ns: u64,
}

impl Meters {
    fn open(ksm: Arc<Ksm>, ksmd: Ksmd) -> Result<Self> {
        let ksmd_ns = ksmd.cpu_ns()?;
        let saved = ksm.counters()?.view(true, false).saved().bytes().0;
        Ok(Self { ksm, ksmd, began: Instant::now(), saved, own_ns: own_and_children_cpu_ns(), ksmd_ns })
    }

    fn read(&mut self) -> Result<Point> {
        let own_ns = own_and_children_cpu_ns().saturating_sub(self.own_ns);
        Ok(Point {
            seconds: self.began.elapsed().as_secs_f64(),
            saved: self.ksm.counters()?.view(true, false).saved().bytes().0.saturating_sub(self.saved),
            own_cpu: Duration::from_nanos(own_ns).saturating_sub(thread_cpu()),
            ksmd_cpu: Duration::from_nanos(self.ksmd.cpu_ns()?.saturating_sub(self.ksmd_ns)),
        })
    }
}

/// CPU time of the calling thread: the first number in its schedstat. Kernels without CONFIG_SCHED_INFO say zero, and
/// then the CPU time of drawing counts as pagefold's.
fn thread_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split_ascii_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}
