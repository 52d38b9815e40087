//! Looks at KSM while something folds, on a thread of its own, and draws what it sees.

use super::picture::Canvas;
use super::workers::proportional_bytes;
use anyhow::{Context, Result};
use pagefold_linux::ksm::Ksm;
use pagefold_linux::ksm::ksmd::Ksmd;
use pagefold_linux::os::cpu::own_and_children_cpu_ns;
use pagefold_linux::proc::process::Process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks at the counters.
const LOOK: Duration = Duration::from_millis(50);
/// Looks between two pictures, and between two lines where no picture can be drawn.
const LOOKS_A_PICTURE: u32 = 4;
const LOOKS_A_LINE: u32 = 40;

/// One look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Since the start.
    pub seconds: f64,
    /// What KSM's counters show as saved, beyond what they showed at the start.
    pub saved: u64,
    /// CPU time of this process since the start, without that of looking and drawing.
    pub own_cpu: Duration,
    /// CPU time of ksmd since the start.
    pub ksmd_cpu: Duration,
}

impl Point {
    /// CPU time of both.
    pub fn cpu(&self) -> Duration {
        self.own_cpu + self.ksmd_cpu
    }
}

/// What there is to draw.
#[derive(Debug)]
pub struct View<'a> {
    /// The looks so far; never none.
    pub points: &'a [Point],
    /// Memory of each worker in bytes, where asked for.
    pub workers: &'a [u64],
    /// A line, because no picture can be drawn.
    pub line: bool,
}

/// What was seen.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Never none.
    pub points: Vec<Point>,
    /// Memory of each worker at the end, where asked for.
    pub workers: Vec<u64>,
    /// CPU time of looking and drawing.
    pub drawing: Duration,
}

impl Seen {
    /// The last look.
    pub fn last(&self) -> Point {
        self.points.last().copied().unwrap_or_default()
    }

    /// The last look at or before a time.
    pub fn at(&self, seconds: f64) -> Point {
        self.points.iter().take_while(|point| point.seconds <= seconds).last().copied().unwrap_or_default()
    }

    /// The first look at which so much was saved.
    pub fn reached(&self, saved: u64) -> Option<Point> {
        self.points.iter().copied().find(|point| saved > 0 && point.saved >= saved)
    }
}

/// The thread.
#[derive(Debug)]
pub struct Watch {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Seen>>>,
}

impl Watch {
    /// Begins to look; time and costs count from now. `pids` are asked for their memory at every picture.
    pub fn start(
        ksm: Arc<Ksm>,
        pids: &[i32],
        mut picture: impl FnMut(&View<'_>) -> Vec<String> + Send + 'static,
    ) -> Result<Self> {
        let ksmd = Ksmd::find()?.context("there is no ksmd to be seen")?;
        let processes = pids.iter().map(|&pid| Process::open(pid)).collect::<Result<Vec<_>, _>>()?;
        let end = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&end);
        let mut eye = Eye::open(ksm, ksmd)?;
        let thread = std::thread::spawn(move || {
            let mut canvas = Canvas::new();
            let looks_a_picture = if canvas.is_live() { LOOKS_A_PICTURE } else { LOOKS_A_LINE };
            let mut seen = Seen::default();
            for looks in 0.. {
                let last = told.load(Ordering::Acquire);
                seen.points.push(eye.look()?);
                if last || looks % looks_a_picture == 0 {
                    seen.workers = processes.iter().map(proportional_bytes).collect::<Result<_, _>>()?;
                    let line = !canvas.is_live() && !last;
                    canvas.draw(&picture(&View { points: &seen.points, workers: &seen.workers, line }));
                }
                if last {
                    break;
                }
                std::thread::park_timeout(LOOK);
            }
            seen.drawing = drawing_cpu();
            Ok(seen)
        });
        Ok(Self { end, thread: Some(thread) })
    }

    /// Takes a last look, draws a last picture, and tells what was seen.
    pub fn finish(mut self) -> Result<Seen> {
        self.end().unwrap_or_else(|| Ok(Seen::default()))
    }

    fn end(&mut self) -> Option<Result<Seen>> {
        self.end.store(true, Ordering::Release);
        let thread = self.thread.take()?;
        thread.thread().unpark();
        Some(thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("the picture could not be drawn"))))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Joined, so that the terminal has its cursor again before anything else is said.
        self.end();
    }
}

/// Reads counters and clocks against those of the start.
struct Eye {
    ksm: Arc<Ksm>,
    ksmd: Ksmd,
    began: Instant,
    saved: u64,
    own_ns: u64,
    ksmd_ns: u64,
}

impl Eye {
    fn open(ksm: Arc<Ksm>, ksmd: Ksmd) -> Result<Self> {
        let ksmd_ns = ksmd.cpu_ns()?;
        let saved = ksm.counters()?.view(true, false).saved().bytes().0;
        Ok(Self { ksm, ksmd, began: Instant::now(), saved, own_ns: own_and_children_cpu_ns(), ksmd_ns })
    }

    fn look(&mut self) -> Result<Point> {
        let own_ns = own_and_children_cpu_ns().saturating_sub(self.own_ns);
        Ok(Point {
            seconds: self.began.elapsed().as_secs_f64(),
            saved: self.ksm.counters()?.view(true, false).saved().bytes().0.saturating_sub(self.saved),
            own_cpu: Duration::from_nanos(own_ns).saturating_sub(drawing_cpu()),
            ksmd_cpu: Duration::from_nanos(self.ksmd.cpu_ns()?.saturating_sub(self.ksmd_ns)),
        })
    }
}

/// CPU time of the calling thread: the first number in its schedstat. Where the kernel keeps none (without
/// CONFIG_SCHED_INFO), looking and drawing stay part of the costs.
fn drawing_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split_ascii_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_found_by_time_and_by_saving() {
        let point = |seconds, saved| Point { seconds, saved, ..Point::default() };
        let seen = Seen { points: vec![point(0.0, 0), point(1.0, 50), point(2.0, 90)], ..Seen::default() };
        assert_eq!(seen.at(1.5).saved, 50);
        assert_eq!(seen.reached(60).unwrap().saved, 90);
        assert_eq!((seen.reached(91), seen.reached(0)), (None, None));
        assert_eq!(seen.last().saved, 90);
    }
}
