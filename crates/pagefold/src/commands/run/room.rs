//! Messages when the headroom for writes to merged pages changes, on the machine or below a cgroup's limit.

use pagefold_engine::keys::LimitKey;
use pagefold_engine::reserve::{Reserve, Room, RoomState};
use pagefold_text::style::human;
use std::collections::BTreeMap;

/// The states of the headroom that we reported last.
#[derive(Debug, Default)]
pub struct RoomReports {
    machine: RoomState,
    /// The limits that had too little headroom at the last call, with their states.
    limits: BTreeMap<LimitKey, RoomState>,
}

impl RoomReports {
    /// The message about the machine, if its state has changed since the last call.
    pub fn of_machine(&mut self, reserve: &Reserve, take_back: bool) -> Option<String> {
        let room = reserve.machine();
        if self.machine == room.state {
            return None;
        }
        self.machine = room.state;
        Some(sentence(room, "", take_back))
    }

    /// The messages about limits whose state has changed. `name` returns a limit's cgroup.
    pub fn of_limits(&mut self, reserve: &Reserve, take_back: bool, name: impl Fn(LimitKey) -> String) -> Vec<String> {
        let before = std::mem::take(&mut self.limits);
        let mut lines = Vec::new();
        for (&key, room) in reserve.limits() {
            if before.get(&key).copied().unwrap_or_default() != room.state {
                lines.push(sentence(room, &format!(" below the limit of {}", name(key)), take_back));
            }
            if room.state != RoomState::Enough {
                self.limits.insert(key, room.state);
            }
        }
        lines
    }
}

fn sentence(room: &Room, place: &str, take_back: bool) -> String {
    let [left, reserve, worst] = [room.left, room.reserve, room.worst].map(|pages| human(pages.bytes().0));
    match room.state {
        RoomState::Enough => format!(
            "memory is sufficient again{place}: {left} is free, and writes to merged pages need at most {worst}"
        ),
        RoomState::Overcommitted => format!(
            "memory is overcommitted{place}: writes to merged pages may need {worst}, and {left} is free; free some \
             memory"
        ),
        RoomState::Short => {
            let action = match (take_back, place) {
                (true, _) => "memory is unmerged in steps",
                (false, "") => "nothing more is merged",
                (false, _) => "its processes' memory is merged no further",
            };
            format!("memory is short{place}: {left} is free, and the reserve is {reserve}; {action} until more is free")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_engine::host::{LimitView, MemoryView};
    use pagefold_engine::keys::OwnerKey;
    use pagefold_engine::reserve::Keep;
    use pagefold_engine::units::Pages;

    #[test]
    fn each_change_is_reported_once() {
        let (mut reserve, mut reports) = (Reserve::default(), RoomReports::default());
        let mut lines = |available: u64, left: Option<u64>| {
            let mib = |mib: u64| Pages(mib * 256);
            let memory = MemoryView { total: mib(1_000), available: mib(available), ..MemoryView::default() };
            let view = |left| LimitView {
                key: LimitKey(1),
                limit: mib(100),
                left: mib(left),
                kills: None,
                owners: vec![OwnerKey(1)],
                read_ns: 0,
            };
            let limits: Vec<LimitView> = left.map(view).into_iter().collect();
            reserve.look(Keep::Auto, &memory, mib(300), &limits, |_| mib(50));
            let take_back = available == 40;
            let machine = reports.of_machine(&reserve, take_back);
            let limits = reports.of_limits(&reserve, take_back, |_| "/sys/fs/cgroup/a".to_owned());
            machine.into_iter().chain(limits).collect::<Vec<_>>()
        };
        assert!(lines(900, Some(80)).is_empty());
        let found = lines(200, Some(4));
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0],
            "memory is overcommitted: writes to merged pages may need 300 MiB, and 200 MiB is free; free some memory"
        );
        assert_eq!(
            found[1],
            "memory is short below the limit of /sys/fs/cgroup/a: 4 MiB is free, and the reserve is 5 MiB; its \
             processes' memory is merged no further until more is free"
        );
        assert!(lines(190, Some(3)).is_empty());
        let found = lines(40, None);
        assert!(
            found.len() == 1 && found[0].contains("memory is short: ") && found[0].contains("unmerged in steps"),
            "{found:?}"
        );
        let found = lines(900, Some(4));
        assert!(found.len() == 2 && found[0].starts_with("memory is sufficient again"), "{found:?}");
    }
}
