//! Formats that pagefold writes itself: the state file, the control socket, the injector.

use pagefold_inject::fuzzing::{Reply, Request as InjectorRequest, reply_limit};
use pagefold_ksm::Knob;
use pagefold_ksm::state_file::State;
use protocol::{ControlState, REQUEST_MOST, Refusal, Request};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

// The program isn't a library, so we include its only module that reads what others write.
#[allow(dead_code)]
#[path = "../../crates/pagefold/src/control/protocol.rs"]
mod protocol;

/// The state file: prints and parses back; every changed knob has an original value; and recorded values are
/// recognised.
pub fn state_file(text: &[u8]) {
    let Ok(mut state) = State::parse(text) else { return };
    let printed = serde_json::to_vec_pretty(&state).expect("plain strings and numbers");
    assert_eq!(State::parse(&printed).as_ref(), Ok(&state));
    assert!(state.turned.keys().all(|knob| state.original.contains_key(knob)));
    for knob in Knob::ALL {
        let values = state.turned.get(&knob).cloned().unwrap_or_default();
        assert!(values.iter().all(|&value| state.is_ours(knob, value)));
        let from = values.last().copied().unwrap_or(5);
        state.note(knob, from, 17);
        assert!(state.is_ours(knob, 17));
    }
}

/// The control socket: requests print and parse back within the accepted length; refusals are one printable line, and
/// answers print and parse back.
pub fn control(line: &[u8]) {
    match Request::parse(line) {
        Ok(request) => {
            let printed = request.line();
            assert!(printed.len() <= REQUEST_MOST && printed.find('\n') == Some(printed.len() - 1));
            assert_eq!(Request::parse(printed.as_bytes()), Ok(request));
        }
        Err(error) => {
            assert!(!error.contains(char::is_control), "{error:?}");
            assert!(error.len() < 400 + 12 * line.len());
        }
    }
    if let Ok(refusal) = serde_json::from_slice::<Refusal>(line) {
        let printed = serde_json::to_vec(&refusal).expect("a string");
        assert!(!printed.contains(&b'\n'));
        assert_eq!(serde_json::from_slice::<Refusal>(&printed).ok(), Some(refusal));
    }
    if let Ok(state) = serde_json::from_slice::<ControlState>(line) {
        let printed = serde_json::to_vec(&state).expect("plain strings and numbers");
        assert!(!printed.contains(&b'\n'));
        let again: ControlState = serde_json::from_slice(&printed).expect("what was printed");
        // serde_json reads the last digit of a fraction approximately.
        assert!((again.allowed_share - state.allowed_share).abs() <= 1e-15 * state.allowed_share.abs());
        assert_eq!(ControlState { allowed_share: state.allowed_share, ..again }, state);
    }
}

/// The injector: requests and replies print and parse back, and time limits are at most an hour.
pub fn injector(line: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<InjectorRequest>(line) {
        assert!(reply_limit(request.calls.len(), &request.limits) <= Duration::from_secs(3600));
        assert_same(&request);
    }
    if let Ok(reply) = serde_json::from_slice::<Reply>(line) {
        assert_same(&reply);
    }
}

fn assert_same<T: PartialEq + Serialize + DeserializeOwned>(value: &T) {
    let printed = serde_json::to_vec(value).expect("plain strings and numbers");
    assert!(serde_json::from_slice::<T>(&printed).is_ok_and(|again| again == *value));
}
