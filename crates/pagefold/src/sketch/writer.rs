//! `pagefold run` with sketches: when to read, and a thread that writes the file, so that no disk delays the run.

use super::keeper::{Keeper, Now};
use super::settings::Fleet;
use crate::config::ownership;
use crate::place::Place;
use pagefold_core::engine::Engine;
use pagefold_core::trickle::Trickle;
use pagefold_core::units::Permyriad;
use pagefold_linux::host::live::LiveHost;
use pagefold_sketch::Row;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// The share of a core that reading may take. With what beginning a portion costs and writing the file, less than 0.1 %.
const SHARE: Permyriad = Permyriad(8);
/// How long a pass waits until the mappings of all processes are known: there may always be new ones.
const KNOWN_LIMIT_NS: u64 = 60_000_000_000;
/// How long the end of a run waits for a write that is under way.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Keeps sketches during a run.
pub struct Writer {
    keeper: Keeper,
    trickle: Trickle,
    interval_ns: u64,
    next_pass_ns: u64,
    next_write_ns: u64,
    /// Dropped to end the thread.
    rows: Option<SyncSender<Vec<Arc<Row>>>>,
    ended: Receiver<()>,
}

impl Writer {
    /// Starts the thread. Without it there are no sketches, and one line says so.
    pub fn start(fleet: Fleet, place: Place, interval: Duration, host: &LiveHost) -> Option<Self> {
        let (rows, to_write) = sync_channel::<Vec<Arc<Row>>>(1);
        let (ending, ended) = sync_channel::<()>(0);
        let write = move || {
            let _ending = ending;
            let mut complained = false;
            for rows in to_write {
                match put(&place, &rows) {
                    Err(error) if !std::mem::replace(&mut complained, true) => {
                        let path = ownership::shown(&place.path);
                        complain!("cannot write the sketches {path}: {error}; free some space (it is tried again)");
                    }
                    Err(_) => {}
                    Ok(()) => complained = false,
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("sketches".into()).spawn(write) {
            complain!("cannot start the thread for sketches: {error}; they are not kept");
            return None;
        }
        let interval_ns = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        let trickle = Trickle::new(SHARE, host.now_ns());
        let keeper = Keeper::new(fleet);
        Some(Self {
            keeper,
            trickle,
            interval_ns,
            next_pass_ns: 0,
            next_write_ns: interval_ns,
            rows: Some(rows),
            ended,
        })
    }

    /// Reads a portion if one is due, and has the file written when it is time.
    pub fn step(&mut self, engine: &mut Engine, host: &mut LiveHost) {
        let now = Now::of(host);
        if !self.keeper.is_reading() {
            // Until all are known, a workload could be read in part.
            let are_known = || host.targets().all(|target| target.is_known() || target.young);
            if now.ns < self.next_pass_ns || now.ns < self.next_pass_ns + KNOWN_LIMIT_NS && !are_known() {
                return;
            }
            self.keeper.begin(host);
            self.next_pass_ns = now.ns + self.interval_ns;
        }
        let most = self.trickle.portion(now.ns);
        if most == 0 {
            return;
        }
        let step = self.keeper.step(host, now, most, |owner, most| engine.take_pages(owner, most));
        self.trickle.spend(step.pages, step.cpu_ns);
        if step.ended || now.ns >= self.next_write_ns {
            self.next_write_ns = now.ns + self.interval_ns;
            // If the disk has not taken the last ones yet, these are left out.
            let _ = self.rows.as_ref().map(|rows| rows.try_send(self.keeper.rows()));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.rows.take());
        let _ = self.ended.recv_timeout(END_LIMIT);
    }
}

/// Replaces the file. Only root may read it: a sketch tells who has the key what was there.
pub fn put(place: &Place, rows: &[Arc<Row>]) -> io::Result<()> {
    place.replace(0o600, |file: &mut File| {
        pagefold_sketch::write(&mut *file, rows).map_err(io::Error::other)?;
        file.sync_all()
    })
}
