//! Child processes that end with us.

use std::process::Child;
use std::time::{Duration, Instant};

/// A child process. Killed when dropped.
#[derive(Debug)]
pub struct OwnedChild(pub Child);

impl OwnedChild {
    pub fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap_or(0)
    }

    /// Waits for a process that we've asked to end. Kills it if it's still running after `limit`.
    pub fn end(&mut self, limit: Duration) {
        end_child(&mut self.0, limit);
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        // Both calls fail only if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for a child that we've asked to end. Kills it if it's still running after `limit`.
pub fn end_child(child: &mut Child, limit: Duration) {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            _ => return,
        }
    }
    // Both calls fail only if the process has already ended.
    let _ = child.kill();
    let _ = child.wait();
}
