//! A workload with its sketch.

use crate::count::CLASSES;
use crate::key::KeyId;
use crate::sketch::{Estimate, Sketch};
use pagefold_engine::units::PAGE_BYTES;
use std::fmt;

pub const NAME_BYTES: usize = 1024;
/// The largest number that a column may have, except for times: 1 PiB. So the rows of a file add up to less than 2^63,
/// and database engines can add them as 64-bit numbers.
pub const NUMBER_MOST: u64 = 1 << 50;
/// The latest time that a column may have, in the year 2112.
pub const TIME_MOST: u64 = 1 << 52;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Vm,
    Pod,
    Container,
    /// A systemd unit or any other cgroup.
    Unit,
    /// Processes outside all of these, by program.
    Process,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::Vm, Self::Pod, Self::Container, Self::Unit, Self::Process];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Pod => "pod",
            Self::Container => "container",
            Self::Unit => "unit",
            Self::Process => "process",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A workload on a host at a time. Times are microseconds since 1970, UTC; memory is in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub host: String,
    pub key: KeyId,
    pub kind: Kind,
    /// The name that operators know, without its kind.
    pub workload: String,
    /// The trust domain. A workload in two domains has two rows.
    pub domain: String,
    pub time_us: u64,
    /// When the previous sketch was complete or, for the first one, when it began. The period of `came_bytes`,
    /// `went_bytes`, `broken_bytes` and `cpu_millicores` starts there.
    pub since_us: u64,
    /// Resident anonymous memory that may be merged.
    pub anonymous_bytes: u64,
    /// The part of the anonymous memory that the sketch covers.
    pub read_bytes: u64,
    /// Pages of zeros in that part.
    pub zero_bytes: u64,
    /// The other pages of that part, by the number of copies of their content within the workload: 1, 2, 3 to 15,
    /// 16 to 255, 256 and more.
    pub pages: [u64; CLASSES],
    /// How much the workload would save alone: all copies but one of each content, zeros included.
    pub savable_bytes: u64,
    pub saved_bytes: u64,
    /// The highest `broken_bytes` of all periods so far.
    pub take_back_bytes: u64,
    /// Contents that the previous sketch didn't have. Each counts once.
    pub came_bytes: u64,
    /// Contents that the previous sketch had and this one doesn't.
    pub went_bytes: u64,
    /// Merged pages that were written in the period.
    pub broken_bytes: u64,
    /// CPU time divided by the length of the period, thousandths of a core.
    pub cpu_millicores: u64,
    pub host_memory_bytes: u64,
    pub host_cpu_millicores: u64,
    /// The workload's distinct contents except zeros.
    pub sketch: Sketch,
}

impl Row {
    /// A row with a sketch and nothing else.
    pub fn blank(sketch: Sketch) -> Self {
        Self {
            host: String::new(),
            key: KeyId::default(),
            kind: Kind::Process,
            workload: String::new(),
            domain: String::new(),
            time_us: 0,
            since_us: 0,
            anonymous_bytes: 0,
            read_bytes: 0,
            zero_bytes: 0,
            pages: [0; CLASSES],
            savable_bytes: 0,
            saved_bytes: 0,
            take_back_bytes: 0,
            came_bytes: 0,
            went_bytes: 0,
            broken_bytes: 0,
            cpu_millicores: 0,
            host_memory_bytes: 0,
            host_cpu_millicores: 0,
            sketch,
        }
    }

    /// Refuses values that no host reports. Files come from hosts that may be hostile.
    pub fn check(&self) -> Result<(), String> {
        for (name, text) in [("host", &self.host), ("workload", &self.workload), ("domain", &self.domain)] {
            if text.is_empty() || text.len() > NAME_BYTES {
                return Err(format!("the name in {name} has {} bytes, not 1 to {NAME_BYTES}", text.len()));
            }
            if text.chars().any(char::is_control) {
                return Err(format!("the name in {name} has a control character"));
            }
        }
        let mut all = 0;
        for pages in self.pages {
            all += pages.min(NUMBER_MOST);
        }
        if all > (self.read_bytes.saturating_sub(self.zero_bytes)) / PAGE_BYTES {
            return Err("it has more pages than were read".to_owned());
        }
        for (name, part, whole_name, whole) in [
            ("since_us", self.since_us, "time_us", self.time_us),
            ("read_bytes", self.read_bytes, "anonymous_bytes", self.anonymous_bytes),
            ("zero_bytes", self.zero_bytes, "read_bytes", self.read_bytes),
            ("savable_bytes", self.savable_bytes, "read_bytes", self.read_bytes),
        ] {
            if part > whole {
                return Err(format!("{name} is {part}, more than {whole_name}, {whole}"));
            }
        }
        // By chance even the lower bound may be too high: we allow another 10 %.
        let Estimate { low, .. } = self.sketch.contents();
        if 0.9 * low > all as f64 {
            return Err(format!("its sketch has at least {low:.0} contents in {all} pages"));
        }
        Ok(())
    }
}
