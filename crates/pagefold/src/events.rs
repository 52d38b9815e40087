//! The run's latest actions, for `status`, `top` and the web page of `top`: a list of fixed length. The same code that
//! writes to the audit log adds events.
//!
//! If we do the same to a process again within a minute, for the same reason, we count it in the same event. So a
//! program that causes many events doesn't push all others out of the list at once. The journal gets each event when it
//! begins, unless we print a message about the event anyway, or there are too many of them.

use crate::audit::{Change, Demand, Entry, Owner};
use crate::history::now;
use crate::service::{Journal, MessageLimit};
use pagefold_text::figures::thousands;
use pagefold_text::style::human;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Instant;
use tracing::debug;

/// We keep at most this many events.
const MOST: usize = 200;
/// An event counts repetitions for this many seconds after its beginning.
const GROWS: u64 = 60;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When the event last happened, seconds since 1970.
    pub time: u64,
    /// The kind of event: `mark`, `unmark`, `merge`, `override`, `left-alone`, `scan`, `governor`, `pause`, `resume`,
    /// `exclude`, `include`, `settings`, `injector`, `stood-down` or `error`.
    pub what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub times: u64,
    /// How many bytes of the process we marked, unmarked or merged. `bytes` is how many we tried to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The reason, or a description of the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// The kind of the reason. Only events of equal kind count as repetitions.
    #[serde(skip)]
    kind: &'static str,
    #[serde(skip)]
    began: u64,
}

impl Event {
    pub fn sentence(&self, dry_run: bool) -> String {
        let process = match (&self.name, self.pid) {
            (Some(name), Some(pid)) => format!("{name} ({pid})"),
            _ => String::new(),
        };
        let why = self.why.as_deref().unwrap_or_default();
        let size = match (self.done_bytes, self.bytes) {
            (Some(done), Some(all)) if done < all => format!("{} of {}", human(done), human(all)),
            (done, _) => human(done.unwrap_or(0)),
        };
        let marked = if dry_run { "would mark" } else { "marked" };
        let unmarked = if dry_run { "would unmark" } else { "unmarked" };
        let merged = if dry_run { "would merge" } else { "merged" };
        let text = match self.what.as_str() {
            "mark" => format!("{marked} {size} of {process}: {why}"),
            "unmark" => format!("{unmarked} {size} of {process}: {why}"),
            "merge" => format!("{merged} {size} of {process}"),
            "override" => format!("{process} is merged because of --override-opt-out: {why}"),
            "left-alone" => format!("{process} is left alone: {why}"),
            "scan" => format!("ksmd has scanned the marked memory: {why}"),
            "pause" => "paused".to_owned(),
            "resume" => "resumed".to_owned(),
            "governor" => format!("the governor is {why}"),
            _ => why.to_owned(),
        };
        if self.times > 1 && self.what != "scan" { format!("{text} ({} times)", thousands(self.times)) } else { text }
    }
}

/// The events, the newest last.
#[derive(Debug, Default)]
pub struct Events {
    list: VecDeque<Event>,
    journal: Option<(Journal, MessageLimit)>,
    dry_run: bool,
}

impl Events {
    /// An empty list. If there's a journal, new events go there, too.
    pub fn new(journal: Option<Journal>, dry_run: bool) -> Self {
        let journal = journal.map(|journal| (journal, MessageLimit::new(Instant::now())));
        Self { journal, dry_run, ..Self::default() }
    }

    pub fn list(&self) -> Vec<Event> {
        self.list.iter().cloned().collect()
    }

    /// Adds an event for a line of the audit log.
    pub fn add_entry(&mut self, entry: &Entry) {
        let event = match entry {
            Entry::Mark(change) => Event::of_change("mark", change),
            Entry::Unmark(change) => Event::of_change("unmark", change),
            Entry::Merge(merge) => Event {
                bytes: Some(merge.bytes),
                done_bytes: Some(merge.done_bytes),
                ..Event::of_owner("merge", &merge.owner)
            },
            Entry::Override(found) => {
                Event { why: Some(found.why.sentence.clone()), ..Event::of_owner("override", &found.owner) }
            }
            Entry::Exclude(Demand { scope, uid }) => {
                return self.note("exclude", format!("excluded at the request of uid {uid}: {scope}"));
            }
            Entry::Include(Demand { scope, uid }) => {
                return self.note("include", format!("included again at the request of uid {uid}: {scope}"));
            }
            // A reload adds its own event for a new scope.
            Entry::Begin { .. } | Entry::Scope { .. } | Entry::Lost { .. } | Entry::End { .. } => return,
        };
        self.add(event, now());
    }

    /// Adds an event about a process.
    pub fn add_of_process(&mut self, what: &str, pid: i32, name: &str, why: &str) {
        self.add(Event { why: Some(why.to_owned()), ..Event::of_process(what, pid, name) }, now());
    }

    /// Adds an event about the run.
    pub fn note(&mut self, what: &str, why: impl Into<String>) {
        self.add(Event { what: what.to_owned(), why: Some(why.into()), ..Event::default() }, now());
    }

    fn add(&mut self, event: Event, now: u64) {
        debug!(target: "event", "{}", event.sentence(self.dry_run));
        let same = self.list.iter_mut().rev().find(|other| other.is_same(&event) && now < other.began + GROWS);
        if let Some(same) = same {
            same.bytes = sum(same.bytes, event.bytes);
            same.done_bytes = sum(same.done_bytes, event.done_bytes);
            same.time = now;
            same.why = event.why;
            same.pid = event.pid;
            same.name = event.name;
            same.times += 1;
            return;
        }
        if let Some((journal, limit)) = &mut self.journal {
            if !event.is_printed() && (event.pid.is_none() || limit.admit(Instant::now()).is_some()) {
                journal.add(&event.fields(self.dry_run));
            }
        }
        if self.list.len() == MOST {
            self.list.pop_front();
        }
        self.list.push_back(Event { time: now, began: now, times: 1, ..event });
    }
}

impl Event {
    /// Whether the run prints a message about this event anyway.
    fn is_printed(&self) -> bool {
        !matches!(self.what.as_str(), "mark" | "unmark" | "merge" | "override" | "pause" | "resume" | "governor")
    }

    /// The fields of the event's journal entry.
    fn fields(&self, dry_run: bool) -> Vec<(&'static str, String)> {
        let mut fields = vec![
            ("MESSAGE", self.sentence(dry_run)),
            ("PRIORITY", "6".to_owned()),
            ("SYSLOG_IDENTIFIER", "pagefold".to_owned()),
            ("PAGEFOLD_EVENT", self.what.clone()),
        ];
        if let Some(pid) = self.pid {
            fields.push(("OBJECT_PID", pid.to_string()));
        }
        if let Some(name) = &self.name {
            fields.push(("PAGEFOLD_PROCESS", name.clone()));
        }
        if let Some(bytes) = self.done_bytes {
            fields.push(("PAGEFOLD_BYTES", bytes.to_string()));
        }
        fields
    }

    fn of_process(what: &str, pid: i32, name: &str) -> Self {
        Self { what: what.to_owned(), name: Some(name.to_owned()), pid: Some(pid), ..Self::default() }
    }

    fn of_owner(what: &str, owner: &Owner) -> Self {
        Self::of_process(what, owner.pid, &owner.name)
    }

    fn of_change(what: &str, change: &Change) -> Self {
        let outcome = change.outcome.outcome;
        let sentence = &change.why.sentence;
        let why = match outcome {
            "done" => sentence.clone(),
            "busy" => format!("{sentence} (busy, to be tried again)"),
            _ => format!("{sentence} (refused, or the program has ended)"),
        };
        Self {
            bytes: Some(change.bytes),
            done_bytes: Some(change.outcome.done_bytes),
            why: Some(why),
            kind: if outcome == "done" { change.why.kind } else { outcome },
            ..Self::of_owner(what, &change.owner)
        }
    }

    /// Whether this event repeats the other one. Any user can start any number of programs that we leave alone, so we
    /// count all of those as one event, and name the last program.
    fn is_same(&self, other: &Self) -> bool {
        let is_of_any = matches!(self.what.as_str(), "scan" | "left-alone");
        let same_process = is_of_any || self.pid.is_some() && self.pid == other.pid;
        same_process && self.what == other.what && self.kind == other.kind
    }
}

fn sum(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    Some(one?.saturating_add(other?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marked(pid: i32, kind: &'static str) -> Event {
        let why = Some("it is duplicate".to_owned());
        let event = Event::of_process("mark", pid, "redis");
        Event { kind, bytes: Some(4 << 20), done_bytes: Some(3 << 20), why, ..event }
    }

    #[test]
    fn what_happens_again_within_a_minute_is_one_event() {
        let mut events = Events::default();
        for (pid, kind, time) in
            [(1, "a", 100), (2, "a", 110), (1, "a", 130), (1, "b", 131), (1, "a", 159), (1, "a", 160)]
        {
            events.add(marked(pid, kind), time);
        }
        let found: Vec<_> = events.list().iter().map(|event| (event.pid.unwrap(), event.time, event.times)).collect();
        assert_eq!(found, [(1, 159, 3), (2, 110, 1), (1, 131, 1), (1, 160, 1)]);
        let sentence = events.list()[0].sentence(false);
        assert_eq!(sentence, "marked 9 MiB of 12 MiB of redis (1): it is duplicate (3 times)");
        assert!(events.list()[1].sentence(true).starts_with("would mark 3 MiB of 4 MiB"));
    }

    #[test]
    fn the_list_is_bounded_and_the_oldest_goes_first() {
        let mut events = Events::default();
        for pid in 0..9_000 {
            events.add(marked(pid, ""), 100);
            events.add_of_process("left-alone", pid, "gpg", "on the deny list (gpg)");
        }
        events.note("governor", "low");
        events.note("governor", "low");
        let list = events.list();
        assert_eq!(
            (list.len(), list[0].pid, list[199].sentence(false)),
            (MOST, Some(8_802), "the governor is low".into())
        );
        assert_eq!(
            marked(7, "").fields(false)[3..],
            [
                ("PAGEFOLD_EVENT", "mark".to_owned()),
                ("OBJECT_PID", "7".to_owned()),
                ("PAGEFOLD_PROCESS", "redis".to_owned()),
                ("PAGEFOLD_BYTES", "3145728".to_owned())
            ]
        );
        let text = serde_json::to_string(&list[199]).unwrap();
        assert!(text.contains(r#""what":"governor","times":1,"why":"low""#) && !text.contains("pid"), "{text}");
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap().why, list[199].why);
    }
}
