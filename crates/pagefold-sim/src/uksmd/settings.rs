//! UKSM's parameters (section 5.2, table 1) and their defaults (sections 5.2 and 7).

use pagefold_core::governor::{Governor, share_ns};
use pagefold_core::units::Permyriad;

/// How UKSM scans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UksmSettings {
    /// Where chance starts from.
    pub seed: u64,
    /// Scan levels (`N`).
    pub levels: usize,
    /// The share of a core for the top level (`p`); halved from level to level downwards.
    pub top: Permyriad,
    /// The share of a core for the bottom level.
    pub bottom: Permyriad,
    /// Time of a global sampling round (`t`), nanoseconds; divided evenly among the levels.
    pub round_ns: u64,
    /// Time asleep in each sleep-scan cycle (`T_s`), nanoseconds.
    pub sleep_ns: u64,
    /// A region is promoted if at least this share of its sampled pages was duplicate (`V_dup`).
    pub duplicate: Permyriad,
    /// And less than this share of what was merged was COW-broken (`V_cow`); `None` to ask no such thing.
    pub cow: Option<Permyriad>,
    /// A region must have lived so long to be sampled (`V_life`), nanoseconds, and across one whole sleep-scan cycle.
    pub life_ns: u64,
    /// How much of a page is hashed.
    pub strength: HashStrength,
    /// How long a page stays in the tree of unmerged pages.
    pub renewal: Renewal,
    /// Pages of zeros are mapped to the zero page. The paper does not speak of them; its authors' patch does this.
    pub zero_pages: bool,
}

/// How many of a page's 1024 words are hashed (section 6). Contents have no bytes here, so nothing here can show what the
/// words would tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HashStrength {
    /// Always so many; pages that differ never have one hash.
    Fixed(u32),
    /// As the controller finds best (section 6.1), starting from half; it is asked when the tree of unmerged pages is
    /// renewed.
    Adaptive {
        /// Below so many words pages that differ have one hash; from there on none have.
        distinct_from: u32,
    },
}

/// When the tree of unmerged pages is emptied: nothing protects its pages, so it is right only for a time. The paper does
/// not say when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// At each global round.
    Round,
    /// When this share of all pages has been sampled: a quarter in the authors' patch (`hash_round_finished`).
    Coverage(Permyriad),
}

impl UksmSettings {
    /// A governor's parameters (section 7), everything else by default.
    pub fn of_governor(governor: Governor) -> Self {
        let pace = governor.pace();
        Self { top: pace.top, round_ns: pace.round_ns, ..Self::default() }
    }

    /// The share of a core that a level may use (section 7), levels counted from 1: in ten-thousandths, 1 to 9,999.
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

    /// How long a region must have been there to be sampled (section 5.2: "only those regions which live across this
    /// sleep-scan cycle time may get sampled").
    pub(super) fn admission_ns(&self) -> u64 {
        self.life_ns.max(self.sleep_ns + self.round_ns)
    }
}

/// Time asleep that makes a share of the whole out of time spent.
pub(super) fn pause_ns(spent_ns: u64, share: Permyriad) -> u64 {
    let share = u64::from(share.0);
    (spent_ns * (10_000 - share)).div_ceil(share)
}

impl Default for UksmSettings {
    /// The Full governor, and the thresholds of section 5.2; `T_s`, for which the paper gives no number, is the lifetime that
    /// depends on it. The strength is where the authors' patch for 6.12 begins and rests, as measured (section 8.3.2:
    /// "usually within 100 words"). The renewal is theirs, too: once a round, contents that exist twice would hardly ever be
    /// found, and the patch does find them.
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
            strength: HashStrength::Fixed(64),
            renewal: Renewal::Coverage(Permyriad(2_500)),
            zero_pages: true,
        }
    }
}
