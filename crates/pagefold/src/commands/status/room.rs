//! The headroom for writes to merged pages, as `status` shows it.

use crate::control::queue::Facts;
use pagefold_engine::host::Mechanism;
use pagefold_engine::reserve::{Room, RoomState};
use pagefold_text::style::{count, human};
use serde::{Deserialize, Serialize};

/// We list at most this many limits, and count the others.
const LISTED_MOST: usize = 20;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ReserveView {
    /// The reserve as the user set it.
    pub keep: String,
    /// Whether we unmerge pages when memory is short. False if we merge on request.
    pub take_back: bool,
    pub likely_bytes: u64,
    pub headroom_bytes: u64,
    pub headroom_at_worst_bytes: u64,
    pub taken_back_bytes: u64,
    pub machine: Room,
    /// Limits with too little headroom for copies of all merged pages, sorted by state (short before overcommitted) and
    /// then by the memory left.
    pub limits: Vec<LimitRow>,
    pub limits_overcommitted: usize,
    pub limits_short: usize,
    /// How many cgroup limits have no headroom to merge more, and the cgroup of the first.
    pub limits_full: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full: Option<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LimitRow {
    pub cgroup: String,
    #[serde(flatten)]
    pub room: Room,
}

impl ReserveView {
    pub fn of(facts: &Facts) -> Self {
        let reserve = &facts.state.reserve;
        let config = &facts.run.config;
        let mut limits = Vec::new();
        for limit in &reserve.limits {
            if let Some(cgroup) = facts.limited.get(&limit.key) {
                limits.push(LimitRow { cgroup: cgroup.clone(), room: limit.room });
            }
        }
        limits.truncate(LISTED_MOST);
        Self {
            keep: config.reserve.keep.to_string(),
            take_back: config.reserve.take_back && config.mechanism == Mechanism::Ksmd,
            likely_bytes: reserve.likely_bytes,
            headroom_bytes: reserve.headroom_bytes,
            headroom_at_worst_bytes: reserve.headroom_at_worst_bytes,
            taken_back_bytes: reserve.taken_back_bytes,
            machine: reserve.machine,
            limits,
            limits_overcommitted: reserve.limits_overcommitted,
            limits_short: reserve.limits_short,
            limits_full: reserve.full.len(),
            full: reserve.full.first().and_then(|key| facts.limited.get(key).cloned()),
        }
    }

    /// A sentence on the machine's headroom.
    pub fn sentence(&self) -> String {
        let rest = format!(
            "{} free (with swap), {} needed if programs write to all merged pages; the reserve is {} ({})",
            human(self.machine.left.bytes().0),
            human(self.machine.worst.bytes().0),
            human(self.machine.reserve.bytes().0),
            self.keep
        );
        match self.machine.state {
            RoomState::Enough => rest,
            RoomState::Overcommitted => format!("overcommitted: {rest}"),
            RoomState::Short if self.take_back => format!("SHORT, so memory is being unmerged: {rest}"),
            RoomState::Short => format!("SHORT, so nothing more is merged: {rest}"),
        }
    }

    /// The limits without headroom to merge more, if there are any.
    pub fn headroom_sentence(&self) -> Option<String> {
        let cgroup = self.full.as_ref()?;
        let limits = count(self.limits_full, "cgroup limit has", "cgroup limits have");
        Some(format!("{limits} no headroom for more merged pages, which stay charged to one cgroup; {cgroup} is full"))
    }

    /// The limits with too little headroom for copies of all merged pages, if there are any.
    pub fn limits_sentence(&self) -> Option<String> {
        let LimitRow { cgroup, room } = self.limits.first()?;
        let left = human(room.left.bytes().0);
        let worst = human(room.worst.bytes().0);
        let word = if room.state == RoomState::Short { "SHORT" } else { "overcommitted" };
        let all = self.limits_overcommitted + self.limits_short;
        Some(format!(
            "{} with too little headroom, {} of them SHORT; {cgroup} is {word}: {left} free, {worst} may be needed",
            count(all, "cgroup limit", "cgroup limits"),
            self.limits_short
        ))
    }
}
