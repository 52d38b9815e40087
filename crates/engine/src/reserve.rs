//! Headroom for COW: is there room if merged pages come back as copies?
//!
//! A write to a merged page needs a page for the copy. At worst, programs take back everything that we save. The likely
//! amount is what they took back in the worst hour, halved for each hour since. (The kernel counts copies of the whole
//! machine. Anybody can cause many by marking memory of their own, so one burst must not count for long.) We compare
//! the memory left, on the machine and below each cgroup limit, with the worst case and with the reserve:
//!
//! - If less is left than the worst case needs, memory is overcommitted. On the machine that is the point of merging,
//!   so we go on and warn. Below a limit, merging makes no room for the cgroup that keeps the copies, so we bound how
//!   much we merge there ([`crate::headroom`]). Memory there is overcommitted only if programs have grown since, or if
//!   all processes in scope are below the limit.
//! - If less is left than the reserve, memory is short: we merge nothing more there until there's room again.
//!
//! Unmerging makes no room, it takes some at once. It only brings forward, in steps and while there is room, copies
//! that programs' writes would otherwise make later, perhaps all at once. So we only do it if asked to, and leave half
//! of the reserve to programs that need memory at that time.

use crate::error::ConfigError;
use crate::host::{LimitView, MemoryView};
use crate::keys::{LimitKey, OwnerKey};
use crate::ledger::Copies;
use crate::units::{PAGE_BYTES, Pages, Permyriad, as_bytes, whole};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

/// `Keep::Auto` keeps at least this share of memory, unless copies of all merged pages take less.
const AUTO_SHARE: Permyriad = Permyriad(500);
/// The largest size that users can set, bytes: more than any machine has.
const SIZE_MOST: u64 = 1 << 50;
/// A state begins when the room falls below an amount. It ends once the room exceeds that amount by one part in this
/// many.
const HYSTERESIS: u64 = 8;
/// How often we check how much memory is left, nanoseconds.
const LOOK_NS: u64 = 1_000_000_000;
/// The time between two steps of unmerging, nanoseconds: by then we know how much memory is left.
const STEP_NS: u64 = 2_000_000_000;
/// For this long after we unmarked memory, nanoseconds, copies don't count as caused by programs. We only read the
/// kernel's count once a second, so some of them are still from unmarking.
const OWN_COPIES_NS: u64 = 2_000_000_000;

/// How much memory we keep free for copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// Enough for the copies that programs are likely to make of merged pages, and at least 5 % of memory. But never
    /// more than copies of all merged pages would take.
    #[default]
    Auto,
    /// A share of the machine's memory, and of each limit.
    Share(Permyriad),
    /// This much of the machine's memory. Below limits, as with `Auto`.
    Fixed(Pages),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReserveSettings {
    pub keep: Keep,
    /// Whether we unmerge memory while less than the reserve is left, starting where merging pays least.
    pub take_back: bool,
}

/// Whether there's room for copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoomState {
    /// There's room for copies of all merged pages.
    #[default]
    Enough,
    /// There isn't enough room if all merged pages come back.
    Overcommitted,
    /// Less is left than the reserve.
    Short,
}

impl RoomState {
    /// How much memory must be left so that `state` doesn't apply. If it already applies, we ask for some more.
    fn needs(self, amount: Pages, state: Self) -> Pages {
        let more = if self >= state { amount.0 / HYSTERESIS } else { 0 };
        Pages(amount.0 + more)
    }
}

/// The room on the machine or below a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    pub state: RoomState,
    /// The machine's memory, or the limit.
    #[serde(rename = "total_bytes", with = "as_bytes")]
    pub total: Pages,
    /// How much of the total is left. For the machine, this includes free swap.
    #[serde(rename = "left_bytes", with = "as_bytes")]
    pub left: Pages,
    /// How much should be left.
    #[serde(rename = "reserve_bytes", with = "as_bytes")]
    pub reserve: Pages,
    /// How much can come back at worst.
    #[serde(rename = "worst_bytes", with = "as_bytes")]
    pub worst: Pages,
}

impl Room {
    fn new(before: RoomState, total: Pages, left: Pages, reserve: Pages, worst: Pages) -> Self {
        let state = if left < before.needs(reserve, RoomState::Short) {
            RoomState::Short
        } else if left < before.needs(worst, RoomState::Overcommitted) {
            RoomState::Overcommitted
        } else {
            RoomState::Enough
        };
        Self { state, total, left, reserve, worst }
    }

    /// How much memory unmerging may take now: half of the reserve stays.
    fn spare(&self) -> Pages {
        self.left.saturating_sub(Pages(self.reserve.0 / 2))
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Share(part) => part.fmt(f),
            Self::Fixed(pages) => {
                let kib = pages.0 * 4;
                for (shift, unit) in [(30, 'T'), (20, 'G'), (10, 'M')] {
                    if kib > 0 && kib.trailing_zeros() >= shift {
                        return write!(f, "{}{unit}", kib >> shift);
                    }
                }
                write!(f, "{kib}K")
            }
        }
    }
}

impl FromStr for Keep {
    type Err = ConfigError;

    /// Parses `auto`, a size with a unit (`512M`, `2G`), or a share of memory (`10%`).
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let keep = match text.strip_suffix('%') {
            Some(share) => parse_share(share).map(Self::Share),
            None => parse_size(text).map(Self::Fixed),
        };
        keep.ok_or_else(|| ConfigError::NoAmount(text.to_owned()))
    }
}

fn parse_share(text: &str) -> Option<Permyriad> {
    let share: f64 = text.trim_end().parse().ok()?;
    if !(0.0..=100.0).contains(&share) {
        return None;
    }
    Some(Permyriad(u32::try_from(whole((share * 100.0).round())).ok()?))
}

fn parse_size(text: &str) -> Option<Pages> {
    let size = text.strip_suffix("iB").unwrap_or(text);
    let unit = "KMGT".find(size.chars().last()?.to_ascii_uppercase())?;
    let digits = &size[..size.len() - 1];
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let bytes = digits.parse::<u64>().ok()?.checked_mul(1024 << (10 * unit))?;
    (bytes <= SIZE_MOST).then_some(Pages(bytes.div_ceil(PAGE_BYTES)))
}

impl Keep {
    fn of_machine(self, total: Pages, worst: Pages, likely: Pages) -> Pages {
        match self {
            Self::Auto => likely.max(share(total, AUTO_SHARE)).min(worst),
            Self::Share(part) => share(total, part),
            Self::Fixed(pages) => pages,
        }
    }

    /// The reserve below a limit. It doesn't follow the likely amount, which we only know for the whole machine.
    fn of_limit(self, limit: Pages, worst: Pages) -> Pages {
        match self {
            Self::Auto | Self::Fixed(_) => self.below(limit).min(worst),
            Self::Share(_) => self.below(limit),
        }
    }

    /// How much to keep free below a limit, so that its programs can grow.
    pub(crate) fn below(self, limit: Pages) -> Pages {
        match self {
            Self::Auto | Self::Fixed(_) => share(limit, AUTO_SHARE),
            Self::Share(part) => share(limit, part),
        }
    }
}

fn share(of: Pages, part: Permyriad) -> Pages {
    let pages = u128::from(of.0) * u128::from(part.0) / 10_000;
    Pages(u64::try_from(pages).unwrap_or(u64::MAX))
}

/// A step of unmerging: where memory is short, and how much we may take.
#[derive(Clone, Debug)]
pub struct Step {
    machine_is_short: bool,
    /// The machine's spare memory, without swap.
    spare: Pages,
    /// For processes below limits: whether memory is short there, and how much is spare.
    limited: BTreeMap<OwnerKey, (bool, Pages)>,
}

impl Step {
    /// Whether unmerging this much of a process's memory helps, and there's room for its copies.
    pub fn allows(&self, owner: OwnerKey, copies: Pages) -> bool {
        let (short, spare) = self.limited.get(&owner).copied().unwrap_or((false, Pages(u64::MAX)));
        (self.machine_is_short || short) && copies <= spare.min(self.spare)
    }
}

/// Watches the room for copies.
#[derive(Clone, Debug, Default)]
pub struct Reserve {
    machine: Room,
    limits: BTreeMap<LimitKey, Room>,
    /// The processes with too little memory below a limit.
    short: BTreeSet<OwnerKey>,
    /// Copies caused by programs' writes. We don't count copies from unmarking: otherwise each step of unmerging would
    /// make more copies look likely.
    copies: Copies,
    own_copies: u64,
    counted: u64,
    own_until_ns: u64,
    next_step_ns: u64,
    next_look_ns: u64,
}

impl Reserve {
    /// Whether it's time to check again how much memory is left. The host doesn't update its figures more often.
    pub fn is_due(&mut self, now_ns: u64) -> bool {
        let is_due = now_ns >= self.next_look_ns;
        self.next_look_ns = if is_due { now_ns + LOOK_NS } else { self.next_look_ns };
        is_due
    }

    /// We're unmarking memory now, which makes copies, too.
    pub fn expect_own_copies(&mut self, now_ns: u64) {
        self.own_until_ns = now_ns + OWN_COPIES_NS;
    }

    /// Records the kernel's count of copies.
    pub fn count_copies(&mut self, now_ns: u64, counted: u64) {
        let new = if self.counted == 0 { 0 } else { counted.saturating_sub(self.counted) };
        self.own_copies += if now_ns < self.own_until_ns { new } else { 0 };
        self.counted = self.counted.max(counted);
        self.copies.observe(now_ns, self.counted.saturating_sub(self.own_copies));
    }

    /// Checks how much memory is left. `worst` is the machine's saving, and `worst_of` an upper bound on a process's
    /// part of it. Returns whether memory is or was short for some process.
    pub fn look(
        &mut self,
        keep: Keep,
        memory: &MemoryView,
        worst: Pages,
        limits: &[LimitView],
        worst_of: impl Fn(OwnerKey) -> Pages,
    ) -> bool {
        let was_short = self.is_short_for_some();
        if memory.total > Pages(0) {
            let left = memory.available + memory.swap_free;
            let reserve = keep.of_machine(memory.total, worst, self.copies.worst_hour(worst));
            self.machine = Room::new(self.machine.state, memory.total, left, reserve, worst);
        }
        let before = std::mem::take(&mut self.limits);
        self.short.clear();
        for limit in limits {
            if limit.limit == Pages(0) {
                continue;
            }
            let state = before.get(&limit.key).map_or(RoomState::Enough, |room| room.state);
            let held: Pages = limit.owners.iter().map(|&owner| worst_of(owner)).sum();
            let worst = held.min(worst);
            let room = Room::new(state, limit.limit, limit.left, keep.of_limit(limit.limit, worst), worst);
            if room.state == RoomState::Short {
                self.short.extend(&limit.owners);
            }
            self.limits.insert(limit.key, room);
        }
        was_short || self.is_short_for_some()
    }

    /// How much is likely to come back: what programs took back in the worst hour, halved for each hour since.
    pub fn likely(&self) -> Pages {
        self.copies.worst_hour(self.machine.worst)
    }

    pub fn machine(&self) -> &Room {
        &self.machine
    }

    /// How much memory unmerging may take on the machine now. Copies must not push other memory out to swap.
    pub fn spare(&self, memory: &MemoryView) -> Pages {
        if memory.total == Pages(0) { Pages(u64::MAX) } else { self.machine.spare().min(memory.available) }
    }

    pub fn limits(&self) -> &BTreeMap<LimitKey, Room> {
        &self.limits
    }

    /// Whether memory is short on the machine.
    pub fn is_short(&self) -> bool {
        self.machine.state == RoomState::Short
    }

    pub fn is_short_for(&self, owner: OwnerKey) -> bool {
        self.is_short() || self.short.contains(&owner)
    }

    /// Whether memory is short for any process.
    pub fn is_short_for_some(&self) -> bool {
        self.is_short() || !self.short.is_empty()
    }

    /// The next step of unmerging, if memory is short and it's time.
    pub fn step(&mut self, now_ns: u64, memory: &MemoryView, limits: &[LimitView]) -> Option<Step> {
        if now_ns < self.next_step_ns || !self.is_short_for_some() {
            return None;
        }
        self.next_step_ns = now_ns + STEP_NS;
        let mut limited: BTreeMap<OwnerKey, (bool, Pages)> = BTreeMap::new();
        for limit in limits {
            let Some(room) = self.limits.get(&limit.key) else { continue };
            for &owner in &limit.owners {
                let (short, spare) = limited.entry(owner).or_insert((false, Pages(u64::MAX)));
                *short |= room.state == RoomState::Short;
                *spare = room.spare().min(*spare);
            }
        }
        Some(Step { machine_is_short: self.is_short(), spare: self.spare(memory), limited })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn memory(available: u64) -> MemoryView {
        MemoryView { total: Pages(1_000), available: Pages(available), ..MemoryView::default() }
    }

    fn limit(left: u64) -> LimitView {
        LimitView {
            key: LimitKey(1),
            limit: Pages(200),
            left: Pages(left),
            kills: None,
            owners: vec![OwnerKey(1), OwnerKey(2)],
            read_ns: 0,
        }
    }

    fn state(reserve: &mut Reserve, keep: Keep, available: u64, worst: u64) -> RoomState {
        reserve.look(keep, &memory(available), Pages(worst), &[], |_| Pages(0));
        reserve.machine().state
    }

    #[test]
    fn amounts_are_read_and_written() {
        for (text, is, shown) in [
            ("auto", Keep::Auto, "auto"),
            ("10%", Keep::Share(Permyriad(1_000)), "10 %"),
            ("0.5 %", Keep::Share(Permyriad(50)), "0.5 %"),
            ("2G", Keep::Fixed(Pages(1 << 19)), "2G"),
            ("1536MiB", Keep::Fixed(Pages(393_216)), "1536M"),
            ("5k", Keep::Fixed(Pages(2)), "8K"),
            ("0M", Keep::Fixed(Pages(0)), "0K"),
        ] {
            assert_eq!((text.parse(), is.to_string().as_str()), (Ok(is), shown));
            assert_eq!(shown.parse(), Ok(is));
        }
        for bad in [
            "",
            "%",
            "-1%",
            "101%",
            "nan%",
            "2",
            "G",
            "2X",
            "+2G",
            "-2G",
            "1.5G",
            "99999T",
            "99999999999999999999G",
            "iB",
            "ä",
        ] {
            assert_eq!(bad.parse::<Keep>(), Err(ConfigError::NoAmount(bad.to_owned())));
        }
    }

    #[test]
    fn auto_goes_on_where_more_is_saved_than_is_left() {
        let mut reserve = Reserve::default();
        let mut at = |available, worst| state(&mut reserve, Keep::Auto, available, worst);
        assert_eq!(at(30, 0), RoomState::Enough, "nothing is saved yet, and merging makes room");
        assert_eq!(at(30, 20), RoomState::Enough);
        assert_eq!(at(200, 800), RoomState::Overcommitted);
        assert_eq!(at(50, 800), RoomState::Overcommitted);
        assert_eq!(at(49, 800), RoomState::Short);
    }

    #[test]
    fn a_state_ends_only_with_some_more_room() {
        use RoomState::{Enough, Overcommitted, Short};
        let mut reserve = Reserve::default();
        let mut at = |available| state(&mut reserve, Keep::Fixed(Pages(80)), available, 160);
        let found = [161, 159, 161, 179, 180, 159, 80, 79, 81, 89, 90].map(&mut at);
        let expected = [
            Enough,
            Overcommitted,
            Overcommitted,
            Overcommitted,
            Enough,
            Overcommitted,
            Overcommitted,
            Short,
            Short,
            Short,
            Overcommitted,
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn free_swap_counts_and_a_share_is_one_of_all_memory() {
        let mut reserve = Reserve::default();
        let with_swap = MemoryView { swap_free: Pages(70), ..memory(40) };
        reserve.look(Keep::Share(Permyriad(1_000)), &with_swap, Pages(0), &[], |_| Pages(0));
        assert_eq!((reserve.machine().left, reserve.machine().reserve), (Pages(110), Pages(100)));
        assert!(!reserve.is_short());
        assert_eq!(state(&mut reserve, Keep::Share(Permyriad(1_000)), 99, 0), RoomState::Short);
    }

    #[test]
    fn an_hour_of_writes_is_likely_to_come_back_again() {
        let mut reserve = Reserve::default();
        reserve.count_copies(S, 5_000);
        reserve.count_copies(2 * S, 5_100);
        assert_eq!(state(&mut reserve, Keep::Auto, 99, 400), RoomState::Short);
        assert_eq!((reserve.likely(), reserve.machine().reserve), (Pages(100), Pages(100)));
        // The reserve is never larger than what we save.
        assert_eq!(state(&mut reserve, Keep::Auto, 99, 60), RoomState::Enough);
        state(&mut reserve, Keep::Auto, 99, 400);
        // Copies from unmarking tell us nothing about the programs.
        reserve.expect_own_copies(3 * S);
        reserve.count_copies(3 * S, 5_100);
        reserve.count_copies(4 * S, 9_000);
        assert_eq!(reserve.likely(), Pages(100));
        reserve.count_copies(6 * S, 9_010);
        assert_eq!(reserve.likely(), Pages(110));
        // A day later we've forgotten it.
        reserve.count_copies(25 * 3_600 * S, 9_011);
        assert_eq!(reserve.likely(), Pages(1));
    }

    #[test]
    fn one_burst_of_writes_does_not_stop_merging_for_a_day() {
        let mut reserve = Reserve::default();
        reserve.count_copies(S, 5_000);
        reserve.count_copies(2 * S, 9_000_000);
        assert_eq!(state(&mut reserve, Keep::Auto, 150, 400), RoomState::Short);
        reserve.count_copies(2 * 3_600 * S, 9_000_000);
        assert_eq!(state(&mut reserve, Keep::Auto, 150, 400), RoomState::Short);
        reserve.count_copies(3 * 3_600 * S, 9_000_000);
        assert_eq!(state(&mut reserve, Keep::Auto, 150, 400), RoomState::Overcommitted);
        assert_eq!(reserve.machine().reserve, Pages(100));
    }

    #[test]
    fn a_limit_concerns_its_own_processes() {
        let mut reserve = Reserve::default();
        let worst_of = |owner: OwnerKey| Pages(u64::from(owner.0) * 20);
        reserve.look(Keep::Fixed(Pages(100)), &memory(900), Pages(500), &[limit(9)], worst_of);
        let room = reserve.limits()[&LimitKey(1)];
        assert_eq!((room.reserve, room.worst, room.state), (Pages(10), Pages(60), RoomState::Short));
        assert!(reserve.is_short_for(OwnerKey(2)) && !reserve.is_short_for(OwnerKey(3)) && !reserve.is_short());
        reserve.look(Keep::Auto, &memory(900), Pages(500), &[limit(59)], worst_of);
        assert_eq!(reserve.limits()[&LimitKey(1)].state, RoomState::Overcommitted);
        assert!(!reserve.is_short_for(OwnerKey(2)));
        reserve.look(Keep::Auto, &memory(900), Pages(500), &[], worst_of);
        assert!(reserve.limits().is_empty());
    }

    #[test]
    fn half_of_the_reserve_is_never_taken_by_taking_apart() {
        let (mut reserve, keep, scarce) = (Reserve::default(), Keep::Fixed(Pages(100)), memory(80));
        reserve.look(keep, &scarce, Pages(500), &[limit(150)], |_| Pages(100));
        let step = reserve.step(S, &scarce, &[limit(150)]).unwrap();
        assert!(step.allows(OwnerKey(9), Pages(30)) && !step.allows(OwnerKey(9), Pages(31)));
        assert!(reserve.step(2 * S, &scarce, &[]).is_none(), "one step at a time");
        // A limit with less room makes the step smaller.
        reserve.look(keep, &scarce, Pages(500), &[limit(20)], |_| Pages(100));
        let step = reserve.step(3 * S, &scarce, &[limit(20)]).unwrap();
        assert!(step.allows(OwnerKey(1), Pages(15)) && !step.allows(OwnerKey(1), Pages(16)));
        // Where nothing is short, we unmerge nothing.
        reserve.look(keep, &memory(900), Pages(500), &[limit(9)], |_| Pages(100));
        let step = reserve.step(5 * S, &memory(900), &[limit(9)]).unwrap();
        assert!(step.allows(OwnerKey(1), Pages(4)) && !step.allows(OwnerKey(3), Pages(4)));
        reserve.look(keep, &memory(900), Pages(500), &[], |_| Pages(0));
        assert!(reserve.step(9 * S, &memory(900), &[]).is_none());
        // Swap is no room for copies.
        let swapping = MemoryView { swap_free: Pages(70), ..memory(20) };
        reserve.look(keep, &swapping, Pages(500), &[], |_| Pages(0));
        let step = reserve.step(11 * S, &swapping, &[]).unwrap();
        assert!(step.allows(OwnerKey(9), Pages(20)) && !step.allows(OwnerKey(9), Pages(21)));
    }
}
