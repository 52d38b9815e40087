//! Threads that write files, so that no disk delays the run.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

/// How long the end of a run waits for a write in progress, since a file system may hang.
const END_LIMIT: Duration = Duration::from_secs(2);

/// A thread with a queue of work. Dropping this lets the thread finish, and waits for it up to [`END_LIMIT`].
#[derive(Debug)]
pub struct Background<T> {
    /// We drop this to end the thread.
    work: Option<SyncSender<T>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl<T: Send + 'static> Background<T> {
    /// Starts a thread. `body` must return when its channel of work is disconnected.
    pub fn start(name: &str, body: impl FnOnce(Receiver<T>) + Send + 'static) -> io::Result<Self> {
        let (work, to_do) = sync_channel(1);
        let (ending, ended) = sync_channel(0);
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _ending: SyncSender<()> = ending;
            body(to_do);
        })?;
        Ok(Self { work: Some(work), ended })
    }

    /// Queues work for the thread. If a piece already waits, because the disk is slow, we drop the new one.
    pub fn offer(&self, work: T) {
        let _ = self.work.as_ref().map(|to_do| to_do.try_send(work));
    }
}

impl<T> Drop for Background<T> {
    fn drop(&mut self) {
        drop(self.work.take());
        let _ = self.ended.recv_timeout(END_LIMIT);
    }
}

/// Reports a failure once, and again only after a success in between.
#[derive(Debug, Default)]
pub struct Complaints {
    complained: bool,
}

impl Complaints {
    pub fn hear(&mut self, outcome: Result<(), String>) {
        match outcome {
            Err(line) if !std::mem::replace(&mut self.complained, true) => complain!("{line}"),
            Err(_) => {}
            Ok(()) => self.complained = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    #[test]
    fn what_was_offered_is_done_before_the_end() {
        let (done, results) = channel();
        let background = Background::start("test", move |numbers| {
            for number in numbers {
                thread::sleep(Duration::from_millis(20));
                let _ = done.send(number);
            }
        });
        background.unwrap().offer(7);
        assert_eq!(results.try_recv(), Ok(7));
    }

    #[test]
    fn a_thread_that_hangs_delays_nothing_but_the_end_and_that_by_two_seconds() {
        let (_never, answer) = channel::<()>();
        let began = Instant::now();
        let background = Background::start("test", move |_numbers| answer.iter().for_each(drop)).unwrap();
        (0..100).for_each(|number| background.offer(number));
        assert!(began.elapsed() < END_LIMIT);
        let end = Instant::now();
        drop(background);
        assert!((END_LIMIT..END_LIMIT * 5).contains(&end.elapsed()));
    }
}
