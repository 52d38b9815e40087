//! The rules of a run, and the verdict that they give on a process: its trust domain, its group, and whether and why we
//! leave it alone.

use crate::marked::MarkedPrograms;
use crate::scope::deny_list::DenyList;
use crate::scope::domain::{DomainRules, Domains};
use crate::scope::dumpable::Dumpable;
use crate::scope::exclude::{Exclusion, exclusion_of, judge_opt_outs};
use crate::scope::kept_out::KeptOut;
use crate::scope::opt_out::OptOut;
use crate::scope::rule::{Rule, first_match};
use crate::scope::{CgroupInfo, ProcessInfo, ScopeSpec, Selection};
use pagefold_engine::host::Mechanism;
use pagefold_engine::keys::{DomainKey, GroupKey};
use pagefold_engine::marking::lifetimes::Lifetimes;
use pagefold_procmem::Roots;
use pagefold_text::escape::printable;
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Debug)]
pub struct ScopeRules {
    pub scope: ScopeSpec,
    pub roots: Roots,
    pub deny: DenyList,
    pub kept_out: KeptOut,
    pub domain_rules: DomainRules,
    pub domains: Domains,
    /// The one domain that ksmd merges. `None`: we don't use ksmd, so each domain is merged separately or not at all.
    pub merged: Option<DomainKey>,
    /// One rule for each group with limits. Its index is the group's number.
    pub groups: Vec<Rule>,
}

impl ScopeRules {
    /// Rules with no groups and no kept-out processes. All domains are merged.
    pub fn new(scope: ScopeSpec, roots: Roots, deny: DenyList) -> Self {
        Self {
            scope,
            roots,
            deny,
            kept_out: KeptOut::default(),
            domain_rules: DomainRules::default(),
            domains: Domains::default(),
            merged: None,
            groups: Vec::new(),
        }
    }

    /// The trust domain of a process.
    pub(crate) fn domain_of(&mut self, info: &ProcessInfo) -> DomainKey {
        self.domains.assign(&self.domain_rules.domain_of(info, &mut Vec::new()))
    }
}

#[derive(Debug, Default)]
pub struct ProgramHistory {
    /// Programs whose memory this run, or an earlier one, has marked. Their forks inherit the marks.
    pub(crate) marked: MarkedPrograms,
    /// How long processes live.
    pub(crate) lifetimes: Lifetimes,
    pub(crate) mechanism: Mechanism,
}

/// Judges processes by the rules of a run.
pub struct Judge<'a> {
    rules: &'a mut ScopeRules,
    pub(crate) history: &'a ProgramHistory,
    selection: Selection,
    /// Facts about cgroups, each read once, by the text of `/proc/PID/cgroup`.
    cgroups: HashMap<Option<Vec<u8>>, Arc<CgroupInfo>>,
}

pub(crate) struct Verdict {
    pub(crate) domain: DomainKey,
    pub(crate) domain_name: String,
    /// Why we leave the process as a whole alone.
    pub(crate) excluded: Option<Exclusion>,
    /// Opt-outs that the administrator has overridden.
    pub(crate) overridden: Vec<OptOut>,
    pub(crate) group: Option<GroupKey>,
    /// One sentence for each rule that applies to the process, or seems to apply but doesn't.
    pub(crate) notes: Vec<String>,
}

impl<'a> Judge<'a> {
    pub fn new(rules: &'a mut ScopeRules, history: &'a ProgramHistory) -> Self {
        let selection = Selection::of_existing(&rules.scope.0, &rules.roots);
        Self { rules, history, selection, cgroups: HashMap::new() }
    }

    pub(crate) fn cgroup_info(&mut self, text: Option<Vec<u8>>) -> Arc<CgroupInfo> {
        let selection = &mut self.selection;
        self.cgroups.entry(text).or_insert_with_key(|text| Arc::new(selection.cgroup_info(text.as_deref()))).clone()
    }

    /// Judges a process by facts that we've just read: `option` is an opt-out on its command line. A process that we
    /// haven't judged before (`is_new`) is kept out if one of its ancestors is. Sets `info.selected_by`. May stop the
    /// process once, to ask whether it's dumpable.
    pub(crate) fn judge(
        &mut self,
        info: &mut ProcessInfo,
        dumpable: Dumpable,
        option: Option<&'static str>,
        is_new: bool,
    ) -> Verdict {
        self.selection.select(info);
        let rules = &mut *self.rules;
        let mut notes = Vec::new();
        let kept_out = rules.kept_out.verdict(info, is_new, &rules.roots);
        let opt_outs = judge_opt_outs(info, option, &rules.deny);
        let domain_name = rules.domain_rules.domain_of(info, &mut notes);
        let domain = rules.domains.assign(&domain_name);
        let excluded = if let Some((by, _)) = kept_out {
            Some(Exclusion::KeptOut { by })
        } else if let Some(opt_out) = opt_outs.excluding {
            Some(Exclusion::OptedOut(opt_out))
        } else if info.selected_by.is_none() {
            Some(Exclusion::OutOfScope)
        } else {
            let other_domain = rules.domains.excludes(domain, rules.merged);
            exclusion_of(info, other_domain, dumpable, self.history.mechanism, &rules.deny)
        };
        let group = first_match(&rules.groups, info, "the limits of", &mut notes);
        if let Some(group) = group {
            notes.push(format!("The limits of {} apply to it.", printable(rules.groups[group].name.as_bytes())));
        }
        for opt_out in &opt_outs.overridden {
            notes.push(format!("overridden: {opt_out}"));
        }
        if let Some((_, selector)) = kept_out {
            notes.push(format!("Kept out by request: pagefold include {selector} lets it in again."));
        }
        let group = group.and_then(|group| Some(GroupKey(u16::try_from(group).ok()?)));
        Verdict { domain, domain_name, excluded, overridden: opt_outs.overridden, group, notes }
    }
}
