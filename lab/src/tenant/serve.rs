//! The main loop of a tenant.

use super::TenantSpec;
use super::memory::FilledSegment;
use anyhow::Context;
use serde_json::Value;
use std::io::{self, BufRead, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What a tenant does by itself between its answers. While it answers, the activity's clock stands still.
pub trait Activity {
    fn begin(&mut self, now: Instant);

    /// When the next step is due. `None` before [`Self::begin`].
    fn due(&self) -> Option<Instant>;

    fn act(&mut self, memory: &mut [FilledSegment]) -> anyhow::Result<()>;

    /// Delays the schedule by the time that an answer took.
    fn pause(&mut self, taken: Duration);

    /// The counters of the steps so far, as JSON. Resets the ones that count since the last answer.
    fn counters(&mut self, now: Instant) -> serde_json::Result<String>;

    /// How many pages of the activity's own memory are damaged.
    fn damaged(&self) -> u64;
}

/// Makes an activity from the JSON in a spec.
pub type StartActivity = fn(Value) -> anyhow::Result<Box<dyn Activity>>;

/// Runs as a tenant: fills memory as `spec`, the JSON of a [`TenantSpec`], says. Then answers commands on standard
/// input until that closes. Never returns.
///
/// | command | effect | answer |
/// | --- | --- | --- |
/// | `verify` | compares every byte with the one that it wrote | `ok`, or `BAD n` for n damaged pages |
/// | `touch N` | reads a word in each of the first N pages | `ok` and their sum |
/// | `chase N` | reads for N ms in each segment, word after word | JSON: nanoseconds per read, for each segment |
/// | `cow` | writes to every page without changing it | `ok` |
/// | `damage` | changes one byte | `ok` |
/// | `begin` | starts the activity | `ok` |
/// | `counters` | | the activity's counters as JSON |
/// | `quit` | ends | |
pub fn serve(spec: &str, start: StartActivity) -> ! {
    let code = match run(spec, start) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("tenant: {error:#}");
            1
        }
    };
    std::process::exit(code)
}

fn run(spec: &str, start: StartActivity) -> anyhow::Result<()> {
    let spec: TenantSpec = serde_json::from_str(spec).context("cannot parse the tenant's spec")?;
    let mut memory = Vec::new();
    for &segment in &spec.segments {
        memory.push(FilledSegment::new(segment, spec.huge)?);
    }
    let mut activity = spec.activity.map(start).transpose()?;
    say("ready")?;
    let lines = lines();
    loop {
        let line = match activity.as_ref().and_then(|activity| activity.due()) {
            None => lines.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(due) => lines.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        match (line, &mut activity) {
            (Ok(line), activity) => {
                let line = line?;
                if line == "quit" {
                    return Ok(());
                }
                let asked = Instant::now();
                say(&answer(&line, asked, &mut memory, activity.as_deref_mut())?)?;
                if let Some(activity) = activity {
                    activity.pause(asked.elapsed());
                }
            }
            (Err(RecvTimeoutError::Timeout), Some(activity)) => activity.act(&mut memory)?,
            (Err(_), _) => return Ok(()),
        }
    }
}

fn say(line: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{line}")?;
    output.flush()
}

fn answer(
    line: &str,
    asked: Instant,
    memory: &mut [FilledSegment],
    activity: Option<&mut (dyn Activity + 'static)>,
) -> anyhow::Result<String> {
    Ok(match line.split_once(' ').unwrap_or((line, "")) {
        ("verify", "") => {
            let mut damaged = 0;
            if let Some(activity) = activity {
                damaged += activity.damaged();
            }
            for segment in memory {
                damaged += segment.damaged();
            }
            if damaged == 0 { "ok".to_owned() } else { format!("BAD {damaged}") }
        }
        ("touch", pages) => {
            let pages = pages.parse().context("touch needs a number of pages")?;
            let words = memory.iter().flat_map(FilledSegment::first_words);
            // We print the sum, or the compiler could optimize away the reads.
            let mut sum: u64 = 0;
            for word in words.take(pages) {
                sum = sum.wrapping_add(word);
            }
            format!("ok {sum}")
        }
        ("chase", time) => {
            let time = Duration::from_millis(time.parse().context("chase needs a number of milliseconds")?);
            let mut speeds = Vec::new();
            for segment in memory {
                speeds.push(segment.chase(time));
            }
            serde_json::to_string(&speeds)?
        }
        ("cow", "") => {
            memory.iter_mut().for_each(FilledSegment::rewrite);
            "ok".to_owned()
        }
        ("damage", "") => {
            let first = memory.first_mut().context("there's no memory to damage")?;
            first.pages_mut()[0] ^= 1;
            "ok".to_owned()
        }
        ("begin", "") => match activity {
            Some(activity) => {
                activity.begin(asked);
                "ok".to_owned()
            }
            None => "nothing to begin".to_owned(),
        },
        ("counters", "") => match activity {
            Some(activity) => activity.counters(asked)?,
            None => "null".to_owned(),
        },
        _ => format!("unknown command {line}"),
    })
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
