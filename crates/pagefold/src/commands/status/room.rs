//! The room for pages that can come back, as `status` shows it.

use crate::control::queue::Facts;
use pagefold_engine::host::Mechanism;
use pagefold_engine::reserve::{Room, RoomState};
use pagefold_text::style::{count, human};
use serde::{Deserialize, Serialize};

/// Limits listed; we count the others.
const LISTED_MOST: usize = 20;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ReserveView {
    /// As it was set.
    pub keep: String,
    /// Whether we unmerge memory while room is short. Not where we merge on request.
    pub take_back: bool,
    pub likely_bytes: u64,
    pub taken_back_bytes: u64,
    pub machine: Room,
    /// Where there isn't room for everything: the shortest first.
    pub limits: Vec<LimitRow>,
    pub limits_overcommitted: usize,
    pub limits_short: usize,
    /// The number of limits without headroom to merge more, and the cgroup of the first.
    #[serde(default)]
    pub limits_full: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
            taken_back_bytes: reserve.taken_back_bytes,
            machine: reserve.machine,
            limits,
            limits_overcommitted: reserve.limits_overcommitted,
            limits_short: reserve.limits_short,
            limits_full: reserve.full.len(),
            full: reserve.full.first().and_then(|key| facts.limited.get(key).cloned()),
        }
    }

    /// The machine's room.
    pub fn sentence(&self) -> String {
        let rest = format!(
            "{} left with swap, {} can come back at worst; the reserve is {} ({})",
            human(self.machine.left.bytes().0),
            human(self.machine.worst.bytes().0),
            human(self.machine.reserve.bytes().0),
            self.keep
        );
        match self.machine.state {
            RoomState::Enough => rest,
            RoomState::Overcommitted => format!("overcommitted: {rest}"),
            RoomState::Short if self.take_back => format!("SHORT, merged memory is taken apart: {rest}"),
            RoomState::Short => format!("SHORT, nothing more is merged: {rest}"),
        }
    }

    /// The limits without headroom to merge more, if there are any.
    pub fn headroom_sentence(&self) -> Option<String> {
        let cgroup = self.full.as_ref()?;
        let limits = count(self.limits_full, "limit of a cgroup", "limits of cgroups");
        Some(format!(
            "none below {limits} for more merged pages, which stay on the charge of one cgroup; {cgroup} is full"
        ))
    }

    /// The limits that don't leave room for everything, if there are any.
    pub fn limits_sentence(&self) -> Option<String> {
        let LimitRow { cgroup, room } = self.limits.first()?;
        let left = human(room.left.bytes().0);
        let worst = human(room.worst.bytes().0);
        let word = if room.state == RoomState::Short { "SHORT" } else { "overcommitted" };
        let all = self.limits_overcommitted + self.limits_short;
        Some(format!(
            "{} of cgroups with too little room, {} of them SHORT; {cgroup} is {word}: {left} left, {worst} can come back",
            count(all, "limit", "limits"),
            self.limits_short
        ))
    }
}
