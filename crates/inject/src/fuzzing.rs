//! Exposes private parsers to `pagefold-fuzz`, which states their properties.

use crate::thread::{Activity, fitness};
use crate::{gadget, worker};
use std::time::Duration;

/// What a thread is doing: running, blocked outside a system call, or blocked in one (number, arguments, program
/// counter).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocked {
    Running,
    Outside,
    In(i64, [u64; 6], u64),
}

/// Parses the activity of a thread. Also returns whether the injector would choose a thread in this state.
pub fn activity(text: &[u8], state: u8) -> Result<(Blocked, bool), &'static str> {
    let activity = Activity::parse(text)?;
    let blocked = match activity {
        Activity::Running => Blocked::Running,
        Activity::Blocked => Blocked::Outside,
        Activity::Syscall { nr, args, pc } => Blocked::In(nr, args, pc),
    };
    Ok((blocked, fitness(state, activity).is_some()))
}

/// The address ranges of executable mappings, the vDSO first.
pub fn executable(maps: &[u8]) -> Vec<(u64, u64)> {
    gadget::executable(maps).iter().map(|code| (code.start, code.end)).collect()
}

/// Parses a request to the injector. Returns whether it survives printing and parsing again, and how long we'd wait for
/// the reply.
pub fn injector_request(line: &[u8]) -> Option<(bool, Duration)> {
    let request: worker::Request = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&request).ok().and_then(|line| serde_json::from_slice(&line).ok());
    Some((again.is_some_and(|again| request == again), worker::reply_limit(request.calls.len(), &request.limits)))
}

/// Parses a reply of the injector. Returns whether it survives printing and parsing again.
pub fn injector_reply(line: &[u8]) -> Option<bool> {
    let reply: worker::Reply = serde_json::from_slice(line).ok()?;
    let again = serde_json::to_vec(&reply).ok().and_then(|line| serde_json::from_slice(&line).ok());
    Some(again.is_some_and(|again| reply == again))
}
