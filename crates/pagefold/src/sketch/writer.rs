//! Sketches during `pagefold run`: decides when to read. A thread writes the file, so that no disk delays the run.

use super::keeper::{Keeper, Now};
use super::settings::Fleet;
use crate::background::{Background, Complaints};
use crate::place::{Place, cannot_write};
use pagefold_engine::engine::Engine;
use pagefold_engine::token_bucket::TokenBucket;
use pagefold_engine::units::Permyriad;
use pagefold_host::live::LiveHost;
use pagefold_sketch::Row;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// The share of a core that reading may take. With all overhead, sketching takes less than 0.1 %.
const SHARE: Permyriad = Permyriad(8);
/// How long a pass waits to learn the mappings of all processes. We can't wait longer: new ones may keep starting.
const KNOWN_LIMIT_NS: u64 = 60_000_000_000;

pub struct Writer {
    keeper: Keeper,
    bucket: TokenBucket,
    interval_ns: u64,
    next_pass_ns: u64,
    next_write_ns: u64,
    rows: Background<Vec<Arc<Row>>>,
}

impl Writer {
    /// Starts the thread that writes. If it can't start, we print a message, and make no sketches.
    pub fn start(fleet: Fleet, place: Place, interval: Duration, host: &LiveHost) -> Option<Self> {
        let started = Background::start("sketches", move |to_write: Receiver<Vec<Arc<Row>>>| {
            let mut complaints = Complaints::default();
            for rows in to_write {
                let written = put(&place, &rows);
                complaints.hear(written.map_err(|error| cannot_write("the sketches", &place.path, &error)));
            }
        });
        if let Err(error) = &started {
            complain!("no sketches are written: cannot start the thread for them: {error}");
        }
        let interval_ns = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        let bucket = TokenBucket::new(SHARE, host.now_ns());
        let keeper = Keeper::new(fleet);
        Some(Self { keeper, bucket, interval_ns, next_pass_ns: 0, next_write_ns: interval_ns, rows: started.ok()? })
    }

    /// Reads a portion if one is due, and lets the thread write the file when it's time.
    pub fn step(&mut self, engine: &mut Engine, host: &mut LiveHost) {
        let now = Now::of(host);
        if !self.keeper.is_reading() {
            if now.ns < self.next_pass_ns {
                return;
            }
            // If we began before we know all mappings, we might read only a part of a workload.
            let are_known = host.targets().all(|target| target.is_known() || target.on_probation);
            if !are_known && now.ns < self.next_pass_ns + KNOWN_LIMIT_NS {
                return;
            }
            self.keeper.begin(host);
            self.next_pass_ns = now.ns + self.interval_ns;
        }
        let most = self.bucket.portion(now.ns);
        if most == 0 {
            return;
        }
        let step = self.keeper.step(host, now, most, |owner, most| engine.take_pages(owner, most));
        self.bucket.spend(step.pages, step.cpu_ns);
        if step.ended || now.ns >= self.next_write_ns {
            self.next_write_ns = now.ns + self.interval_ns;
            self.rows.offer(self.keeper.rows());
        }
    }
}

/// Replaces the file. Only root may read it, since people with the key can test which pages were in memory.
pub fn put(place: &Place, rows: &[Arc<Row>]) -> io::Result<()> {
    place.replace(0o600, |file: &mut File| {
        pagefold_sketch::write(&mut *file, rows).map_err(io::Error::other)?;
        file.sync_all()
    })
}
