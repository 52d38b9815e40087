//! The main loop of a tenant.

use crate::activity::Running;
use crate::memory::Filled;
use crate::spec::{ActivityCounters, TenantSpec};
use anyhow::Context;
use std::io::{BufRead, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Runs as a tenant: fills memory as `spec`, the JSON of a [`TenantSpec`], says, then answers commands on standard input
/// until it closes. Never returns.
///
/// | command | effect | answer |
/// | --- | --- | --- |
/// | `verify` | compares every byte with what was written | `ok`, or `BAD n` for n damaged pages |
/// | `touch N` | reads a word in each of the first N pages | `ok` and their sum |
/// | `chase N` | reads for N ms in each segment, one word after the other | JSON: nanoseconds a read, for each segment |
/// | `cow` | writes to every page without changing it | `ok` |
/// | `damage` | changes one byte | `ok` |
/// | `begin` | starts the activity | `ok` |
/// | `counters` | | [`ActivityCounters`] as JSON |
/// | `quit` | ends | |
pub fn serve(spec: &str) -> ! {
    let code = match run(spec) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("tenant: {error:#}");
            1
        }
    };
    std::process::exit(code)
}

fn run(spec: &str) -> anyhow::Result<()> {
    let spec: TenantSpec = serde_json::from_str(spec).context("cannot parse the tenant's spec")?;
    let filled = spec.segments.iter().map(|&segment| Filled::new(segment, spec.huge));
    let mut memory = filled.collect::<anyhow::Result<Vec<_>>>()?;
    let mut running = spec.activity.map(Running::new).transpose()?;
    let mut output = std::io::stdout().lock();
    let mut say = |line: &str| writeln!(output, "{line}").and_then(|()| output.flush());
    say("ready")?;
    let lines = lines();
    loop {
        let line = match running.as_ref().and_then(Running::due) {
            None => lines.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => lines.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        let line = match line {
            Ok(line) => line?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(running) = &mut running {
                    running.act(&mut memory)?;
                }
                continue;
            }
        };
        let asked = Instant::now();
        match line.split_once(' ').unwrap_or((line.as_str(), "")) {
            ("verify", "") => {
                let own = running.as_ref().map_or(0, Running::damaged);
                match memory.iter().map(Filled::damaged).sum::<u64>() + own {
                    0 => say("ok")?,
                    pages => say(&format!("BAD {pages}"))?,
                }
            }
            ("touch", pages) => {
                let pages = pages.parse().context("touch needs a number of pages")?;
                let words = memory.iter().flat_map(Filled::first_words);
                // The sum is printed so that the reads cannot be optimized away.
                say(&format!("ok {}", words.take(pages).fold(0, u64::wrapping_add)))?;
            }
            ("chase", time) => {
                let time = Duration::from_millis(time.parse().context("chase needs a number of milliseconds")?);
                let speeds: Vec<f64> = memory.iter().map(|filled| filled.chase(time)).collect();
                say(&serde_json::to_string(&speeds)?)?;
            }
            ("cow", "") => {
                memory.iter_mut().for_each(Filled::rewrite);
                say("ok")?;
            }
            ("damage", "") => {
                if let Some(byte) = memory.first_mut().and_then(|filled| filled.pages_mut().first_mut()) {
                    *byte ^= 1;
                }
                say("ok")?;
            }
            ("begin", "") => match &mut running {
                Some(running) => {
                    say("ok")?;
                    running.begin(asked);
                }
                None => say("nothing to begin")?,
            },
            ("counters", "") => {
                let counters =
                    running.as_mut().map_or_else(ActivityCounters::default, |running| running.counters(asked));
                say(&serde_json::to_string(&counters)?)?;
            }
            ("quit", "") => return Ok(()),
            _ => say(&format!("unknown command {line}"))?,
        }
        if let Some(running) = &mut running {
            running.pause(asked.elapsed());
        }
    }
}

/// The lines of standard input, until it ends.
fn lines() -> Receiver<std::io::Result<String>> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}
