//! What the processes would hold if nothing were merged: what they hold, and what merging saves them.
//!
//! The host looks at what a process holds (Pss) when its memory has changed, and we count the saving at other times. So
//! for each look we keep what was saved then: the count of that moment, else the larger of the counts before and after
//! it. (A later count may divide the saving among more relatives by fork.) Held plus saved memory stays the same while
//! the process's memory is merged, or written and copied.

use crate::keys::OwnerKey;
use crate::saving::Saving;
use crate::units::Pages;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug, Default)]
pub struct Holdings {
    /// The host's latest figures.
    held: Arc<BTreeMap<OwnerKey, Pages>>,
    looks: FxHashMap<OwnerKey, Look>,
    /// The time of the last count, nanoseconds. `None` before the first one.
    counted_ns: Option<u64>,
}

/// A look at what a process holds.
#[derive(Clone, Copy, Debug)]
struct Look {
    at_ns: u64,
    held: Pages,
    saved: Pages,
}

impl Holdings {
    /// What a process would hold if nothing were merged. `None` if the host hasn't looked at it.
    pub fn unmerged(&self, owner: OwnerKey) -> Option<Pages> {
        let look = self.looks.get(&owner)?;
        Some(look.held + look.saved)
    }

    /// Follows the host's figures and our counts.
    pub fn follow(&mut self, held: &Arc<BTreeMap<OwnerKey, Pages>>, saving: Option<&Saving>, now_ns: u64) {
        if !Arc::ptr_eq(&self.held, held) {
            self.held = held.clone();
            self.looks.retain(|owner, look| held.get(owner) == Some(&look.held));
            for (&owner, &held) in held.iter() {
                let saved = saving.map_or(Pages(0), |saving| saving.of(owner));
                let look = Look { at_ns: now_ns, held, saved };
                self.looks.entry(owner).or_insert(look);
            }
        }
        let Some(saving) = saving else { return };
        let before_ns = self.counted_ns.replace(saving.counted_ns);
        if before_ns == self.counted_ns {
            return;
        }
        for (&owner, look) in &mut self.looks {
            if look.at_ns == saving.counted_ns {
                look.saved = saving.of(owner);
            } else if before_ns < Some(look.at_ns) && look.at_ns < saving.counted_ns {
                look.saved = look.saved.max(saving.of(owner));
            }
        }
    }
}
