//! The lines of the audit log. `reference.rs` explains the fields.

use crate::config::ownership::shown;
use pagefold_engine::host::{ChangeResult, Marking, Why};
use pagefold_engine::units::{Bytes, Pages};
use pagefold_host::scope::ProcessInfo;
use pagefold_inject::unmerge::UnmarkedMapping;
use pagefold_text::figures::time;
use serde::{Serialize, Serializer};

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "lowercase")]
pub enum Entry {
    Begin {
        command: &'static str,
        version: &'static str,
        pid: u32,
        scope: String,
    },
    /// A reload of the configuration has changed the scope.
    Scope {
        scope: String,
    },
    Mark(Change),
    Unmark(Change),
    Merge(Merge),
    Override(Override),
    /// A user has excluded processes.
    Exclude(Demand),
    /// A user has included processes that were excluded.
    Include(Demand),
    /// `lost` lines are missing here.
    Lost {
        lost: u64,
    },
    /// `lost` is the number of lines lost since the beginning.
    End {
        command: &'static str,
        pid: u32,
        lost: u64,
    },
}

impl Entry {
    pub fn begin(command: &'static str, scope: String) -> Self {
        Self::Begin { command, version: env!("CARGO_PKG_VERSION"), pid: std::process::id(), scope }
    }

    pub fn end(command: &'static str, lost: u64) -> Self {
        Self::End { command, pid: std::process::id(), lost }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Owner {
    pub pid: i32,
    pub start_time_ticks: u64,
    pub name: String,
    pub exe: Option<String>,
    pub uid: Option<u32>,
    pub cgroup: Option<String>,
    pub domain: Option<String>,
}

/// We keep at most this many bytes of a name: users choose the names of their programs and cgroups, up to 4 KiB long.
const NAME_BYTES: usize = 256;

fn cut(mut name: String) -> String {
    if name.len() > NAME_BYTES {
        let mut end = NAME_BYTES;
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        name.truncate(end);
        name.push('…');
    }
    name
}

impl Owner {
    /// Describes a process in the trust domain `domain`.
    pub fn of(info: &ProcessInfo, domain: Option<&String>) -> Self {
        Self {
            pid: info.pid(),
            start_time_ticks: info.process.start_time_ticks(),
            name: info.name.clone(),
            exe: info.exe.as_deref().map(shown).map(cut),
            uid: Some(info.uid()),
            cgroup: info.cgroups.path.clone().map(cut),
            domain: domain.cloned().map(cut),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    #[serde(flatten)]
    pub owner: Owner,
    /// The addresses of the first and the last byte.
    #[serde(serialize_with = "hexadecimal")]
    first: u64,
    #[serde(serialize_with = "hexadecimal")]
    last: u64,
    pub bytes: u64,
    pub why: Reason,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// How many spans this line sums up.
    #[serde(skip_serializing_if = "Option::is_none")]
    spans: Option<usize>,
}

/// The most lines about one process in one cycle, not counting the line that sums up all further spans.
const LINES_MOST: usize = 16;

/// The changes to one process in one cycle.
#[derive(Debug, Default)]
pub struct Changes {
    lines: Vec<Change>,
}

impl Changes {
    pub fn add(&mut self, change: Change) {
        match self.lines.get_mut(LINES_MOST) {
            Some(rest) => rest.join(&change),
            None => self.lines.push(change),
        }
    }
}

impl IntoIterator for Changes {
    type Item = Change;
    type IntoIter = std::vec::IntoIter<Change>;

    fn into_iter(self) -> Self::IntoIter {
        self.lines.into_iter()
    }
}

/// One cycle's requests to merge pages of one process with pages of another, or with the zero page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Merge {
    #[serde(flatten)]
    pub owner: Owner,
    /// The other process, whose pages both now map. `None` if the pages were merged with the zero page.
    with_pid: Option<i32>,
    pub bytes: u64,
    pub done_bytes: u64,
}

/// A user's request about processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Demand {
    /// The processes, as command line flags (`--exe redis-server`).
    pub scope: String,
    pub uid: u32,
}

/// A process whose memory we merge although its owner has opted out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Override {
    #[serde(flatten)]
    pub owner: Owner,
    pub why: Reason,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub kind: &'static str,
    pub sentence: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Outcome {
    pub outcome: &'static str,
    pub done_bytes: u64,
}

impl From<Why> for Reason {
    fn from(why: Why) -> Self {
        let (kind, sentence) = match why {
            Why::Duplicate { duplicate: Pages(part), resident: Pages(all) } => {
                ("duplicate", format!("{part} of its {all} resident pages are zero or have a copy"))
            }
            Why::CowBroken { lasts_ns } => {
                ("cow-broken", format!("its merged pages are written after {} on average", time(lasts_ns as f64 / 1e9)))
            }
            Why::Charge => {
                ("charge", "its pages are charged to another cgroup, whose limit has no headroom for them".to_owned())
            }
            Why::Unmerged => ("unmerged", "it is pinned or not mergeable: almost nothing of it was merged".to_owned()),
            Why::MemoryShort => ("memory-short", "less memory is free than the reserve".to_owned()),
            Why::Asked => ("asked", "requested by a user".to_owned()),
            Why::Excluded => ("excluded", "has been excluded".to_owned()),
        };
        Self { kind, sentence }
    }
}

impl From<Marking> for Outcome {
    fn from(marking: Marking) -> Self {
        match marking {
            Marking::Done(pages) => Self { outcome: "done", done_bytes: pages.bytes().0 },
            Marking::Untried | Marking::Busy | Marking::NoMappings => Self { outcome: "busy", done_bytes: 0 },
            Marking::Refused => Self { outcome: "refused", done_bytes: 0 },
        }
    }
}

impl Entry {
    /// The user whose process the line is about.
    pub(super) fn user(&self) -> Option<u32> {
        match self {
            Self::Mark(change) | Self::Unmark(change) => change.owner.uid,
            Self::Merge(merge) => merge.owner.uid,
            Self::Override(overridden) => overridden.owner.uid,
            _ => None,
        }
    }

    /// The results of one cycle's requests to merge a process's pages.
    pub fn merged(owner: Owner, with_pid: Option<i32>, named: Pages, merged: Pages) -> Self {
        Self::Merge(Merge { owner, with_pid, bytes: named.bytes().0, done_bytes: merged.bytes().0 })
    }

    /// The result of unmarking a mapping at a user's request. `refused`: we couldn't unmark all of the process.
    pub fn asked(owner: Owner, mapping: &UnmarkedMapping, refused: bool) -> Self {
        let outcome = match (mapping.unmarked, refused) {
            (Bytes(0), true) => Marking::Refused.into(),
            (Bytes(0), false) => Marking::Busy.into(),
            (done, _) => Outcome { outcome: "done", done_bytes: done.0 },
        };
        Self::Unmark(Change::new(owner, mapping.start, mapping.end, Why::Asked, outcome))
    }

    pub fn overridden(owner: Owner, opt_out: String) -> Self {
        Self::Override(Override { owner, why: Reason { kind: "opted-out", sentence: opt_out } })
    }
}

impl Change {
    /// The result of unmarking memory that we may not merge any more, and the reason.
    pub fn withdrawn(owner: Owner, result: &ChangeResult, reason: String) -> Self {
        let mut change = Self::of(owner, result);
        change.why.sentence = reason;
        change
    }

    /// The result of an order to mark or unmark a span of a process.
    pub fn of(owner: Owner, result: &ChangeResult) -> Self {
        let span = result.change.span;
        let start = span.first.address();
        Self::new(owner, start, start + span.pages.bytes().0, result.change.why, result.marking.into())
    }

    /// Adds another line's span and sums to this line.
    fn join(&mut self, other: &Self) {
        self.spans = Some(self.spans.unwrap_or(1) + 1);
        self.bytes += other.bytes;
        self.outcome.done_bytes += other.outcome.done_bytes;
        if self.outcome.outcome != "done" && other.outcome.outcome != "refused" {
            self.outcome.outcome = other.outcome.outcome;
        }
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
    }

    fn new(owner: Owner, start: u64, end: u64, why: Why, outcome: Outcome) -> Self {
        Self { owner, first: start, last: end - 1, bytes: end - start, why: why.into(), outcome, spans: None }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn hexadecimal<S: Serializer>(address: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{address:x}"))
}
