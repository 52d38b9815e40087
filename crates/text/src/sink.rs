//! A queue in front of a reader that may stop reading, like a pipe that nobody reads or a disk that doesn't answer.
//!
//! One thread writes, and nobody else waits for it. Once the queue is full we drop new items until the thread has
//! caught up. Then we tell the thread how many we dropped, so that it can show the gap in the right place.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// What the thread has to write next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<T> {
    Item(T),
    /// This many items were lost here.
    Gap(u64),
}

/// The queue. After we drop this, its thread ends as soon as everything is written.
#[derive(Debug)]
pub struct Sink<T> {
    shared: Arc<Shared<T>>,
    room: usize,
}

#[derive(Debug)]
struct Shared<T> {
    queue: Mutex<Queue<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Queue<T> {
    /// Items, and their sizes in bytes.
    items: VecDeque<(T, usize)>,
    bytes: usize,
    /// Items lost since the thread last caught up.
    lost: u64,
    is_writing: bool,
    has_thread: bool,
    is_closed: bool,
}

impl<T: Send + 'static> Sink<T> {
    /// An empty queue with room for this many bytes. Items wait until a thread is started.
    pub fn new(room: usize) -> Self {
        let queue =
            Queue { items: VecDeque::new(), bytes: 0, lost: 0, is_writing: false, has_thread: false, is_closed: false };
        Self { shared: Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::new() }), room }
    }

    /// Starts the thread, unless there is one.
    pub fn start(&self, name: &str, write: impl FnMut(Next<T>) + Send + 'static) -> io::Result<()> {
        if std::mem::replace(&mut self.shared.lock().has_thread, true) {
            return Ok(());
        }
        let shared = self.shared.clone();
        match thread::Builder::new().name(name.to_owned()).spawn(move || shared.write_all(write)) {
            Ok(_) => Ok(()),
            Err(error) => {
                self.shared.lock().has_thread = false;
                Err(error)
            }
        }
    }

    /// Adds an item. Returns false if we dropped it because there's no room. There's always room for an item of size 0.
    pub fn put(&self, item: T, bytes: usize) -> bool {
        let mut queue = self.shared.lock();
        // After a loss we drop everything until the thread has caught up, so that the gap is in one place.
        if bytes > 0 && (queue.lost > 0 || queue.bytes + bytes > self.room) {
            queue.lost += 1;
            return false;
        }
        queue.items.push_back((item, bytes));
        queue.bytes += bytes;
        self.shared.changed.notify_all();
        true
    }

    /// Waits at most `limit` until everything is written. Returns how many items are still unwritten.
    pub fn flush(&self, limit: Duration) -> usize {
        let wait = self.shared.changed.wait_timeout_while(self.shared.lock(), limit, |queue| !queue.is_idle());
        wait.unwrap_or_else(PoisonError::into_inner).0.unwritten()
    }

    pub fn is_idle(&self) -> bool {
        self.shared.lock().is_idle()
    }
}

impl<T> Drop for Sink<T> {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl<T> Queue<T> {
    fn is_idle(&self) -> bool {
        self.unwritten() == 0 && self.lost == 0
    }

    fn unwritten(&self) -> usize {
        self.items.len() + usize::from(self.is_writing)
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_all(&self, mut write: impl FnMut(Next<T>)) {
        let mut queue = self.lock();
        loop {
            let (next, bytes) = if let Some((item, bytes)) = queue.items.pop_front() {
                (Next::Item(item), bytes)
            } else if queue.lost > 0 {
                (Next::Gap(std::mem::take(&mut queue.lost)), 0)
            } else if queue.is_closed {
                return;
            } else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.is_writing = true;
            drop(queue);
            write(next);
            queue = self.lock();
            queue.is_writing = false;
            queue.bytes -= bytes;
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    /// A sink whose thread waits for a permit before each write, and a channel of the items that it has written.
    fn slow(room: usize) -> (Sink<u32>, std::sync::mpsc::Sender<()>, Receiver<Next<u32>>) {
        let (permit, permits) = channel();
        let (written, writes) = channel();
        let sink = Sink::new(room);
        let write = move |next| {
            let _ = permits.recv();
            let _ = written.send(next);
        };
        sink.start("test", write).unwrap();
        (sink, permit, writes)
    }

    #[test]
    fn what_does_not_fit_is_lost_and_the_gap_shows_where() {
        let (sink, permit, writes) = slow(30);
        assert_eq!((0..5).map(|item| sink.put(item, 10)).collect::<Vec<_>>(), [true, true, true, false, false]);
        assert_eq!(sink.flush(Duration::from_millis(1)), 3);
        permit.send(()).unwrap();
        assert_eq!(writes.recv(), Ok(Next::Item(0)));
        // There's room again, but the gap comes first.
        assert!(!sink.put(5, 10));
        for _ in 0..3 {
            permit.send(()).unwrap();
        }
        assert_eq!(writes.iter().take(3).collect::<Vec<_>>(), [Next::Item(1), Next::Item(2), Next::Gap(3)]);
        assert_eq!(sink.flush(Duration::from_secs(60)), 0);
        assert!(sink.put(6, 10) && !sink.is_idle());
        drop(permit);
        assert_eq!(writes.recv(), Ok(Next::Item(6)));
        assert_eq!(sink.flush(Duration::from_secs(60)), 0);
    }

    #[test]
    fn items_wait_for_the_thread_and_it_ends_once_they_are_written() {
        let sink = Sink::new(100);
        assert!(sink.put(7, 1) && sink.put(8, 1));
        let (written, writes) = channel();
        let mut count = 0;
        let write = move |next| {
            count += 1;
            written.send((next, count)).unwrap();
        };
        sink.start("test", write).unwrap();
        sink.start("another", |_| unreachable!("there is one")).unwrap();
        drop(sink);
        assert_eq!(writes.iter().collect::<Vec<_>>(), [(Next::Item(7), 1), (Next::Item(8), 2)]);
    }
}
