//! UKSM's parameters (section 5.2, table 1) and their defaults (sections 5.2 and 7).

use pagefold_engine::governor::{Governor, share_ns};
use pagefold_engine::units::Permyriad;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UksmSettings {
    pub seed: u64,
    /// Scan levels (`N`).
    pub levels: usize,
    /// The top level's share of a core (`p`), halved from level to level downwards.
    pub top: Permyriad,
    /// The bottom level's share of a core.
    pub bottom: Permyriad,
    /// The length of a global sampling round (`t`), nanoseconds; divided evenly among the levels.
    pub round_ns: u64,
    /// The sleep in each sleep-scan cycle (`T_s`), nanoseconds.
    pub sleep_ns: u64,
    /// We promote a region from this share of duplicates among its sampled pages on (`V_dup`).
    pub duplicate: Permyriad,
    /// We don't promote a region from this share of COW-broken pages among its merged ones on (`V_cow`). `None`: we
    /// don't check.
    pub cow: Option<Permyriad>,
    /// We sample a region from this age (`V_life`), nanoseconds; at least one whole sleep-scan cycle.
    pub life_ns: u64,
    /// How many of a page's 1024 words to hash (section 6). Contents have no bytes in the simulator: pages that differ
    /// never share a hash.
    pub strength: u32,
    /// The share of all pages to sample before we empty the tree of unmerged pages: a quarter in the authors' patch
    /// (`hash_round_finished`); zero empties it at each global round. Nothing protects the tree's pages, so it becomes
    /// outdated. The paper doesn't say when to empty it.
    pub renewal: Permyriad,
    /// Whether to map pages of zeros to the zero page. The paper doesn't mention them; its authors' patch does this.
    pub zero_pages: bool,
}

impl UksmSettings {
    /// The settings of a governor (section 7), everything else default.
    pub fn of_governor(governor: Governor) -> Self {
        let pace = governor.pace();
        Self { top: pace.top, round_ns: pace.round_ns, ..Self::default() }
    }

    /// A level's share of a core (section 7), in ten-thousandths from 1 to 9,999. Levels start at 1.
    pub(super) fn share(&self, level: usize) -> Permyriad {
        let share = if level <= 1 && self.levels > 1 {
            self.bottom.min(self.top)
        } else {
            let halvings = u32::try_from(self.levels.saturating_sub(level)).unwrap_or(31).min(31);
            Permyriad(self.top.0 >> halvings)
        };
        Permyriad(share.0.clamp(1, 9_999))
    }

    /// CPU time of one round of a level: `t_l · p_l`.
    pub(super) fn level_ns(&self, level: usize) -> u64 {
        share_ns(self.round_ns / self.levels.max(1) as u64, self.share(level))
    }

    /// CPU time of the active part of a sleep-scan cycle: `T_s · p / (1 - p)` (section 5.3).
    pub(super) fn active_ns(&self, level: usize) -> u64 {
        let share = u64::from(self.share(level).0);
        self.sleep_ns * share / (10_000 - share)
    }

    /// We sample a region from this age (section 5.2: "only those regions which live across this sleep-scan cycle time
    /// may get sampled").
    pub(super) fn admission_ns(&self) -> u64 {
        self.life_ns.max(self.sleep_ns + self.round_ns)
    }
}

/// The sleep that keeps `spent_ns` within a share.
pub(super) fn pause_ns(spent_ns: u64, share: Permyriad) -> u64 {
    let share = u64::from(share.0);
    (spent_ns * (10_000 - share)).div_ceil(share)
}

impl Default for UksmSettings {
    /// The Full governor, and the thresholds of section 5.2. The paper gives no number for `T_s`; the lifetime depends
    /// on it. The authors' patch for 6.12 starts at this strength and stays there, as measured (section 8.3.2: "usually
    /// within 100 words"). The renewal is theirs too: emptied once a round, the tree would hardly ever find contents
    /// that exist twice, and the patch does find them.
    fn default() -> Self {
        let pace = Governor::Full.pace();
        Self {
            seed: 0,
            levels: 4,
            top: pace.top,
            bottom: Permyriad(20),
            round_ns: pace.round_ns,
            sleep_ns: 100_000_000,
            duplicate: Permyriad(1_000),
            cow: Some(Permyriad(5_000)),
            life_ns: 100_000_000,
            strength: 64,
            renewal: Permyriad(2_500),
            zero_pages: true,
        }
    }
}
