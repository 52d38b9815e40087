//! Who is in scope, and what has changed among them.

use super::{Acting, Event, LiveError, LiveHost};
use crate::host::regions::Tracked;
use crate::host::targets::Target;
use crate::proc::process::ReadError;
use crate::scope::exclude::Exclusion;
use crate::scope::{ScopeError, ScopeSpec, Scoped};
use pagefold_core::host::RegionView;
use pagefold_core::keys::{DomainKey, OwnerKey, RegionKey};

/// A look due so soon is taken at once, nanoseconds.
const LOOK_EARLY_NS: u64 = 30_000_000;
/// What it takes to see that nothing has changed in one process, nanoseconds, and the one part in so many of the time
/// that it may take: with more than 300 processes looks become rarer.
const GLANCE_NS: u64 = 1_000;
const GLANCE_SHARE: u64 = 3_333;

impl LiveHost {
    /// Takes in what has changed among the processes, if it is time to look. True if anything has.
    pub(super) fn attend(&mut self, now_ns: u64) -> Result<bool, LiveError> {
        if now_ns + LOOK_EARLY_NS.min(self.look_ns / 8) < self.next_look_ns {
            return Ok(false);
        }
        self.resolve(now_ns)?;
        let changed = self.look(now_ns);
        self.next_look_ns = now_ns + (self.targets.len() as u64 * GLANCE_NS * GLANCE_SHARE).max(self.look_ns);
        if changed {
            self.list_regions();
        }
        Ok(changed)
    }

    /// Takes in who has come into scope.
    pub(super) fn resolve(&mut self, now_ns: u64) -> Result<(), LiveError> {
        let first = self.targets.is_empty() && self.next_owner == 0;
        let mut spec = if first {
            self.scope.clone()
        } else {
            // A pid names one process, which was taken hold of at the start: a later owner is not meant.
            ScopeSpec { pids: Vec::new(), ..self.scope.clone() }
        };
        let mut ours = vec![i32::try_from(std::process::id()).unwrap_or(0)];
        if let Acting::Act { injector, .. } = &self.hands {
            ours.extend(i32::try_from(injector.pid()));
        }
        let found = loop {
            if spec.is_empty() {
                return Ok(());
            }
            let known = |pid| ours.contains(&pid) || self.targets.contains_key(&pid);
            match self.newcomers.find(now_ns, &spec, &self.roots, known) {
                Ok(found) => break found,
                // It was there when the command line was checked, and has ended since: no reason to leave the others.
                Err(ScopeError::UnknownPid(pid)) => spec.pids.retain(|&named| named != pid),
                Err(ScopeError::NoCgroup(_)) if !first => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        };
        if first && found.is_empty() {
            return Err(ScopeError::NoMatch(self.scope.to_string()).into());
        }
        for scoped in found {
            self.next_owner += 1;
            let domain = self.domain_of(&scoped);
            self.targets.insert(scoped.process.pid(), Target::new(scoped, OwnerKey(self.next_owner), domain));
        }
        Ok(())
    }

    /// The key of the domain that a process is in. It stays there for as long as it lives.
    pub(super) fn domain_of(&mut self, scoped: &Scoped) -> DomainKey {
        let name = self.domain_rules.domain_of(scoped);
        let known = self.domains.iter().position(|domain| *domain == name);
        let at = known.unwrap_or_else(|| {
            self.domains.push(name);
            self.domains.len() - 1
        });
        // With more than there are keys, the last ones share one: they are kept apart from all others.
        DomainKey(u16::try_from(at).unwrap_or(u16::MAX))
    }

    /// Looks at every process. True if anything has changed.
    pub(super) fn look(&mut self, now_ns: u64) -> bool {
        let processes = self.targets.len() as u64;
        let mut changed = false;
        let mut gone = Vec::new();
        for (&pid, target) in &mut self.targets {
            let next_region = &mut self.next_region;
            let looked = target.look(now_ns, processes, &self.deny, || {
                *next_region += 1;
                RegionKey(*next_region)
            });
            let why = match looked {
                Ok(false) => None,
                Ok(true) => {
                    changed = true;
                    target.exclusion.as_ref().map(ToString::to_string)
                }
                Err(ReadError::Vanished { .. }) => {
                    changed = true;
                    gone.push(pid);
                    None
                }
                Err(error) => {
                    changed |= !target.regions.is_empty();
                    target.exclusion = Some(if target.is_stuck() { Exclusion::Stuck } else { Exclusion::NotReadable });
                    target.regions.clear();
                    Some(error.to_string())
                }
            };
            if let Some(why) = why {
                if self.told.get(&pid) != Some(&why) {
                    self.told.insert(pid, why.clone());
                    self.events.push(Event::LeftAlone { pid, name: target.name.clone(), why });
                }
            }
        }
        for pid in gone {
            self.targets.remove(&pid);
            self.told.remove(&pid);
            // Somebody else may have its pid already.
            self.newcomers.look_again();
        }
        changed
    }

    /// Says once why nothing can be done to a process.
    pub(super) fn tell_left_alone(&mut self, pid: i32, why: String) {
        let Some(target) = self.targets.get(&pid) else { return };
        if self.told.get(&pid) != Some(&why) {
            self.told.insert(pid, why.clone());
            self.events.push(Event::LeftAlone { pid, name: target.name.clone(), why });
        }
    }

    pub(super) fn list_regions(&mut self) {
        self.region_pids.clear();
        self.views.clear();
        for (&pid, target) in &self.targets {
            for Tracked { key, stretch } in &target.regions {
                self.region_pids.insert(*key, pid);
                self.views.push(RegionView {
                    key: *key,
                    owner: target.owner,
                    family: stretch.family,
                    domain: target.domain,
                    first: stretch.first,
                    pages: stretch.pages,
                    resident: stretch.resident,
                    marked: stretch.marked,
                });
            }
        }
    }
}
