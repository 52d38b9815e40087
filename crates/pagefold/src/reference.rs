//! The manual pages' tables of the program's output: the fields of each JSON document. The tables of metrics are made
//! from `metrics::families`.
//!
//! Tests fail if we print a field that isn't explained here. Add a new field to the row of its neighbours.

#[derive(Clone, Copy, Debug)]
pub struct Schema {
    /// The schema's name and version. The version changes when a field is removed or changes its meaning.
    pub name: &'static str,
    /// The command that prints it.
    pub about: &'static str,
    /// Fields, separated by commas, with their meanings. A nested field has its whole path.
    pub fields: &'static [(&'static str, &'static str)],
}

impl Schema {
    /// The names of all fields, without the objects they're in.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        let rows = self.fields.iter().flat_map(|(fields, _)| fields.split(", "));
        rows.flat_map(|field| field.split('.')).map(|name| name.trim_end_matches("[]"))
    }
}

/// A table for manual pages: its title, its pages, and its rows.
pub type Table = (&'static str, &'static [&'static str], &'static [(&'static str, &'static str)]);

pub const TABLES: [Table; 3] = [
    (
        "FILES",
        &["pagefold", "pagefold-run"],
        &[
            (
                "/etc/pagefold/pagefold.toml, /etc/pagefold/pagefold.toml.d/*.toml",
                "The configuration: see pagefold.toml(5)",
            ),
            ("/run/pagefold/control.sock", "The socket at which the daemon answers status, top and the other commands"),
            ("/run/pagefold/lock", "Locked while a pagefold process controls KSM"),
            (
                "/run/pagefold/ksm-state.json",
                "KSM's settings as they were before, restored at the end of a run or by the next one",
            ),
            (
                "/var/lib/pagefold/history, /var/lib/pagefold/learned.json, /var/lib/pagefold/kept-out.json",
                "The service's savings over time; which memory is worth merging; which processes are excluded",
            ),
        ],
    ),
    (
        "SIGNALS",
        &["pagefold-run"],
        &[
            ("SIGINT, SIGTERM", "End the run and restore KSM's settings. Merged pages stay merged"),
            (
                "SIGHUP",
                "Read the configuration again, and reopen the audit log. Ends a run on a terminal, and a run that has neither",
            ),
        ],
    ),
    (
        "ENVIRONMENT",
        &["pagefold", "pagefold-run"],
        &[
            ("NO_COLOR, TERM", "No colours if NO_COLOR is set to anything, or TERM is dumb"),
            (
                "NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID, JOURNAL_STREAM, LISTEN_FDS, STATE_DIRECTORY",
                "As systemd sets them for the service",
            ),
        ],
    ),
];

/// The documents. Sizes are in bytes and times in seconds unless the name says otherwise.
#[rustfmt::skip]
pub const SCHEMAS: &[Schema] = &[
    Schema {
        name: "pagefold.scan/1",
        about: "Printed by pagefold scan --json. Each of m equal pages counts as (m-1)/m of a page saved, so sums over processes are right. \
                All zero pages can be saved",
        fields: &[
            ("schema, scope", "This document's name; the scope, as flags"),
            ("exact, sampled_fraction", "Whether every page was read; the share of pages that were read"),
            ("error_bytes", "95 % margin of error of the savable memory; 0 if exact"),
            ("without_headroom_bytes", "savable memory that ksmd won't merge, at least: cgroups' memory limits leave too little headroom"),
            ("totals.anonymous_bytes, totals.resident_bytes", "Anonymous pages, where a shared page counts once for each mapping; frames, each divided among its mappings"),
            ("totals.zero_bytes", "Pages of zeros"),
            ("totals.duplicate_within_bytes, totals.duplicate_across_bytes", "Pages with a copy in the same process; with copies in other processes only"),
            ("totals.merged_bytes, totals.fork_shared_bytes, totals.swapped_bytes", "Pages that KSM has merged already; shared by fork; swapped out"),
            ("totals.savable_gross_bytes, totals.metadata_bytes, totals.savable_bytes", "Memory that merging would save; KSM's metadata for it; the difference"),
            ("processes[].pid, processes[].name, processes[].exe, processes[].cgroup, processes[].workload", "A process, with the figures of totals"),
            ("processes[].left_out", "Why the whole process was left out; also set if it has ended"),
            ("processes[].kinds[], processes[].excluded[]", "The process's memory by kind; the part that was left alone"),
            ("kinds[].kind, cgroups[].cgroup, cgroups[].processes", "The figures of totals by kind of memory and by cgroup; the number of the cgroup's processes"),
            ("programs[].name, programs[].processes, workloads[].name, workloads[].processes", "The figures of totals by program and by workload"),
            ("programs[].out_of_reach_bytes, programs[].left_out_bytes, workloads[].out_of_reach_bytes, workloads[].left_out_bytes", "Memory that KSM cannot merge; memory that was left alone"),
            ("excluded[].reason, excluded[].bytes, excluded[].regions", "Memory that was left alone, by reason"),
            ("numa", "As in pagefold.status/1, for pages that were merged before the scan"),
            ("cost.pages_read, cost.cpu_seconds", "Pages read, and total CPU time"),
            ("cost.ns_per_page, cost.reading_ns_per_page", "CPU time per page: total; only for reading, hashing and counting"),
        ],
    },
    Schema {
        name: "pagefold.why/1",
        about: "Printed by pagefold scan --why --json. Frames are divided among their mappings and each of m equal pages counts as (m-1)/m of a duplicate, \
                so sums are right; merged pages count once for each mapping",
        fields: &[
            ("schema, scope, exact, sampled_fraction", "As in pagefold.scan/1"),
            ("error_bytes", "95 % margin of error of all duplicates together; 0 if exact"),
            ("totals, rows[].name, rows[].processes", "All memory; that of a workload or program, or of a process if the scope names pids"),
            ("totals.mapped_bytes", "The sum of all that follows"),
            ("totals.merged_bytes, totals.mergeable_duplicate_bytes, totals.mergeable_unique_bytes", "Merged already; how much merging would save, before metadata; mergeable memory that is unique"),
            ("totals.out_of_reach[].cause, totals.out_of_reach[].duplicate_bytes, totals.out_of_reach[].unique_bytes", "Memory out of KSM's reach, by cause; how much merging it would save; the rest"),
            ("totals.shared_by_fork_bytes, totals.shared_by_file_bytes", "Memory saved because processes share frames by fork, or by mapping the same file"),
            ("totals.unknown[].reason, totals.unknown[].bytes", "Memory that we couldn't read, or mustn't"),
            ("totals.frames_in_common.merged, totals.frames_in_common.by_fork, totals.frames_in_common.by_file", "Frames that several rows map (in a row: this one and another). All 0: nothing is shared"),
            ("frames_between_domains", "As frames_in_common, mapped by several trust domains; missing if there's one domain"),
            ("unexamined_processes, unexamined_bytes", "Processes that couldn't be looked at, and memory; 0 if the frames in common are all that there are"),
            ("causes[].cause, causes[].about, causes[].remedies", "The causes that occur, and what would change them"),
            ("pair", "With two processes: how the second one's memory relates to the first one's"),
            ("pair.pids, pair.pages, pair.sampled_fraction", "The processes; how many pages of like mappings were compared; their share"),
            ("pair.classes[].likeness, pair.classes[].pages", "one_frame, same (place), zeros, elsewhere (an equal page), shifted (by bytes), pointers, counters (few other words differ), incompressible or unique; pages"),
            ("pair.differing_words, pair.pointer_words", "Words that differ where few do; those that are addresses in both processes"),
            ("pair.huge_pages", "Pages that either process maps by huge pages"),
            ("cost.pages_read, cost.cpu_seconds, cost.ns_per_page, cost.reading_ns_per_page", "As in pagefold.scan/1"),
        ],
    },
    Schema {
        name: "pagefold.run/1",
        about: "Printed by pagefold run --json at its end",
        fields: &[
            ("schema, scope, mechanism, governor, dry_run", "The run's settings"),
            ("seconds, processes, pages_read, scans", "Duration; processes in scope; pages read; scans that ksmd made for the run"),
            ("saved_bytes", "How many fewer frames the processes in scope need because of merging; null if they could not be counted"),
            ("marked_bytes, marked_spans, unmarked_bytes", "Address space marked (in a dry run: that would be marked); the number of spans; address space unmarked again"),
            ("expected_bytes", "In a dry run: the duplicates in memory that pagefold would mark; if it would request each merge (/dev/ksm): all duplicates and zeros"),
            ("unknown_bytes", "In a dry run: memory that it was too short to sample"),
            ("merged_pages, metadata_bytes", "Merged pages: pages saved and the copies that they share, null if they could not be counted; KSM's metadata, 64 bytes per marked page"),
            ("requests.asked_pages, requests.merged_pages, requests.shared_pages, requests.differing_pages, requests.failed_pages", "As in pagefold.status/1"),
            ("cpu_seconds.pagefold, cpu_seconds.injector, cpu_seconds.ksmd", "CPU time of pagefold and its injector; of the injector alone; of ksmd"),
            ("seconds_to_90_percent", "When savings last rose to 90 % of their final amount; null if they were above that from the start"),
            ("stops, longest_stop_us, total_stop_us", "How often and how long threads were stopped"),
            ("moved_pages, move_seconds", "Merged pages moved to another memory node; the CPU time for moving"),
            ("knobs_restored, knobs_deferred", "Whether KSM's settings are as before the run; settings that the kernel refuses to restore while pages are merged, with their values"),
            ("stood_down", "Why the run gave KSM up early: somebody else changed a setting"),
            ("audit_lost", "The number of audit log lines that could not be written"),
            ("left_alone[].pid, left_alone[].name, left_alone[].reason, left_alone_more", "Processes left alone; how many more of them there are"),
        ],
    },
    Schema {
        name: "pagefold.status/1",
        about: "Printed by pagefold status --json, and the answer of the control socket",
        fields: &[
            ("schema, pid, scope, dry_run, seconds", "The run; its duration so far"),
            ("mechanism, only", "How equal pages are merged: ksmd, or request (/dev/ksm); which ones: all, or zeros"),
            ("history", "The file to which the run writes its history; null if it keeps none"),
            ("other_bytes", "If ksmd merges only zeros: the marked memory that isn't zeros; ksmd merges equal pages there, too"),
            ("governor, in_force", "The governor that was set; the one that auto has chosen"),
            ("allowed_share, used_share", "Share of a core, 0 to 1: allowed; used in the last ten seconds"),
            ("paused, busy", "Whether the run is paused; whether it is reading, marking or merging right now"),
            ("done_in_seconds", "Roughly how long until the memory that is being read has been read and merged; null if unknown or idle"),
            ("ksm_driven, ksm_why, stood_down", "Whether this run controls KSM; why not; whether it gave up KSM because another program changed a setting"),
            ("available_bytes, resident_bytes", "Memory that programs can get without swapping; anonymous memory in scope that isn't left alone, or is marked"),
            ("saved_bytes, unmerged_bytes, saved_age_seconds", "Memory saved: unmerged_bytes minus the memory that the processes in scope hold; the memory that they would hold if nothing were merged (before the first count, that they hold); the age of the last count. Null until counted, and for some seconds if much has been merged or unmerged since"),
            ("may_return_bytes, saved_machine_bytes", "Memory needed if programs write to all merged pages; savings on the whole machine by KSM's counters, without ended programs"),
            ("exited_bytes", "Memory of ended programs that KSM still counts, until its next scan"),
            ("marked_bytes, metadata_bytes", "Resident memory that is marked (in a dry run: would be marked); KSM's metadata for it"),
            ("others[].pid, others[].name, others[].merged_bytes, others[].metadata_bytes", "Processes outside of the run with merged memory; KSM's metadata for them"),
            ("to_unmark_bytes, foreign_marks", "Marked address space that must be unmarked but couldn't be yet; whether another trust domain owns some of it, which stops marking and scanning"),
            ("copied_bytes, copied_worst_day_bytes", "Merged pages copied again on the machine since the start; the most within 24 hours"),
            ("reserve.keep, reserve.take_back", "The reserve as set; whether memory is unmerged while memory is short"),
            ("reserve.likely_bytes, reserve.taken_back_bytes", "The most memory that writes to merged pages took within an hour, halved for each hour since, and never more than is saved now; address space unmarked because memory was short"),
            ("reserve.headroom_bytes, reserve.headroom_at_worst_bytes", "How much more memory programs may use on the machine (free swap included) if likely_bytes come back, and if all merged memory does"),
            ("reserve.machine.state, reserve.machine.total_bytes, reserve.machine.left_bytes", "enough, overcommitted or short; total memory; headroom"),
            ("reserve.machine.reserve_bytes, reserve.machine.worst_bytes", "The reserve; memory needed if every merged page is written"),
            ("reserve.limits[].cgroup, reserve.limits_overcommitted, reserve.limits_short", "The same figures for up to 20 cgroup limits with too little headroom; how many limits are in each state"),
            ("reserve.limits_full, reserve.full", "How many cgroup limits leave no headroom to merge more; an example of such a cgroup"),
            ("cpu_seconds.pagefold, cpu_seconds.injector, cpu_seconds.ksmd", "As in pagefold.run/1"),
            ("pages_read, scans, rounds, stops, longest_stop_us, total_stop_us", "Totals since the start"),
            ("stop_lengths", "Stops of up to 25, 50, 100, 250, 500 us, 1, 2.5, 5, 10, 25, 100 ms, and longer ones"),
            ("splits.pages, splits.mappings, collapsed", "Huge pages and huge mappings split on the machine since the start; huge pages that the run has collapsed again"),
            ("refused_spans, injector_restarts, audit_lost", "Spans not marked because their program refused or had ended; how often the injector was restarted; audit log lines that could not be written"),
            ("index.contents, index.bytes", "The number of entries in the index of page contents; the size of the index"),
            ("kinds[].kind, kinds[].regions, kinds[].resident_bytes", "Memory by kind"),
            ("levels[].level, levels[].share, levels[].regions, levels[].resident_bytes", "Memory by level of the ladder, from the top; the level's share of a core"),
            ("next[].what, next[].regions, next[].resident_bytes, next[].soonest_seconds", "Memory by its next step, as in pagefold.explain/1"),
            ("domains[].name, domains[].processes, domains[].resident_bytes, domains[].marked_bytes, domains[].left_alone", "Memory by trust domain; whether the domain is left alone because ksmd merges another one"),
            ("processes[].pid, processes[].name, processes[].workload, processes[].regions", "A process, and the workload that it belongs to"),
            ("processes[].resident_bytes, processes[].unmerged_bytes, processes[].marked_bytes, processes[].expected_bytes, processes[].unknown_bytes, processes[].saved_bytes, processes[].left_alone", "The process's memory; its part of what all would hold if nothing were merged, and of the savings; how much isn't sampled enough to tell duplicates; why it is left alone"),
            ("processes[].to_unmark.bytes, processes[].to_unmark.reason, processes[].to_unmark.problem", "Memory to unmark; why it must be unmarked; why that has failed so far"),
            ("scopes[].kind, scopes[].name, scopes[].processes", "Processes by the selector that they match, with the same figures as for processes"),
            ("left_out[].reason, left_out[].processes", "The number of processes left alone, by reason (one word each)"),
            ("kept_out[].selector, kept_out[].uid", "Processes that are excluded until pagefold include; the user who excluded them"),
            ("requests.asked_pages, requests.merged_pages, requests.shared_pages", "With merging on request: pages that pagefold asked the kernel to merge; merged; already merged before"),
            ("requests.differing_pages, requests.failed_pages", "Pages that were written after pagefold read them; pages that the kernel refused to merge for now"),
            ("xen.saved_bytes, xen.frames_bytes, xen.free_bytes, xen.shared_pages", "For Xen guests: the hypervisor's counters; pages that the run has shared"),
            ("numa.nodes[].node, numa.nodes[].total_bytes, numa.nodes[].free_bytes, numa.nodes[].merged_bytes", "With several memory nodes: merged memory by node"),
            ("numa.processes[].pid, numa.processes[].name, numa.processes[].node, numa.processes[].nice, numa.processes[].policy", "A process with merged memory, and where it runs"),
            ("numa.processes[].local_bytes, numa.processes[].remote_bytes, numa.processes[].by_node, numa.processes[].tax", "Its merged memory on its own node and on others; how much longer an access takes on average (0.28: 28 %)"),
            ("numa.misplaced_bytes, numa.moved_pages, numa.refused_pages, numa.move_seconds", "Memory that the policy would put elsewhere; pages moved; refused by the kernel; CPU time"),
            ("events[].time, events[].times, events[].what, events[].pid, events[].name", "The run's latest actions, the newest last: seconds since 1970; how often within a minute; the action; the process"),
            ("events[].bytes, events[].done_bytes, events[].why", "Bytes to mark, unmark or merge; bytes done; the reason"),
        ],
    },
    Schema {
        name: "pagefold.explain/1",
        about: "Printed by pagefold explain --json, and the answer of the control socket",
        fields: &[
            ("schema, pid, name, exe, guest", "The process, or the guest of Xen"),
            ("in_scope, scope, paused, dry_run, levels", "Whether the process is in the run's scope; the run's state"),
            ("left_alone, notes[]", "Why the whole process is left alone; remarks about the rules that apply to it"),
            ("resident_bytes, unseen_bytes", "The process's anonymous memory that pagefold may merge; how much of it pagefold hasn't read or sampled enough to decide on"),
            ("regions[].range, regions[].bytes, regions[].resident_bytes", "A region, the largest first. Mappings above 1 GiB are judged in blocks"),
            ("regions[].mapping, regions[].file", "The mapping's kind: heap, stack, anonymous, guest memory or file copy; its name"),
            ("regions[].kind, regions[].level, regions[].age_seconds", "The region's kind; its level, from 1; for how long it has been known"),
            ("regions[].duplicate_ratio, regions[].duplicate_range, regions[].exact", "Share of duplicates, 0 to 1; the 95 % range of that share; whether the whole region was read"),
            ("regions[].cow_ratio", "Share of it that is left alone for now, because its program wrote merged pages too soon for the merges to pay"),
            ("regions[].marked_bytes, regions[].expected_bytes", "The region's resident memory that is marked; the duplicates expected there"),
            ("regions[].next, regions[].wait_seconds, regions[].sentence", "The next step: sample, read, mark, merge, watch, wait or nothing; the longest wait until then; the same as a sentence"),
            ("regions[].since_seconds", "How long ago that next step was decided"),
            ("decisions[].seconds_ago, decisions[].range, decisions[].bytes", "The last changes of decisions on the process, the newest first: when; on which region"),
            ("decisions[].from, decisions[].to, decisions[].reason", "The next step before the change and after it (as in regions[].next); why"),
            ("excluded[].range, excluded[].bytes, excluded[].file, excluded[].reason", "Mappings that are left alone"),
            ("numa", "The process's row of numa.processes[] in pagefold.status/1"),
        ],
    },
    Schema {
        name: "pagefold.explain-workload/1",
        about: "Printed by pagefold explain --json about anything but a single process",
        fields: &[
            ("schema, selectors, scope, paused, dry_run", "The processes that were asked for, as flags; the run's scope and state"),
            ("resident_bytes, unmerged_bytes, marked_bytes, expected_bytes, unknown_bytes, saved_bytes", "Sums of the processes in scope, as in pagefold.status/1"),
            ("processes[].pid, processes[].name, processes[].workload, processes[].regions", "The processes in scope, as in pagefold.status/1"),
            ("processes[].left_alone, processes[].to_unmark.bytes, processes[].to_unmark.reason, processes[].to_unmark.problem", "As in pagefold.status/1"),
            ("processes_outside", "How many more processes match that are not in the run's scope"),
            ("reasons[].next, reasons[].reason, reasons[].regions, reasons[].resident_bytes", "The regions of these processes by their next step (as in pagefold.explain/1) and its reason"),
        ],
    },
    Schema {
        name: "pagefold.unmerge/1",
        about: "Printed by pagefold exclude and unmerge with --json",
        fields: &[
            ("schema, given_back_bytes, unmarked_bytes, longest_stop_us", "Merged pages copied again; address space unmarked; the longest stop"),
            ("processes[].pid, processes[].name, processes[].given_back_bytes, processes[].unmarked_bytes, processes[].failed", "The same figures by process; the error if unmerging failed"),
            ("still_saved_bytes", "KSM's remaining savings on the machine"),
            ("kept_out, not_kept, by_daemon", "The processes that are excluded from now on, as flags; if they're excluded only until the run ends: why; whether a daemon has done this"),
            ("exit_code", "The command's exit code"),
            ("knobs_deferred, audit_lost", "As in pagefold.run/1"),
        ],
    },
    Schema {
        name: "pagefold.include/1",
        about: "Printed by pagefold include --json",
        fields: &[
            ("schema, scope, not_kept", "The processes to include again, as flags; if they're included only until the run ends: why"),
            ("processes[].pid, processes[].name", "The running processes that were excluded until now"),
        ],
    },
    Schema {
        name: "pagefold.doctor/1",
        about: "Printed by pagefold doctor --json",
        fields: &[
            ("schema, can_run, exit_code, worst", "Whether pagefold run can work; the exit code that it would have; the worst severity"),
            ("findings[].id, findings[].severity", "A name that does not change between versions; ok, note, warning or blocker"),
            ("findings[].what, findings[].why, findings[].todo", "The finding, why it matters, what to do"),
            ("fix.done, fix.lines, fix.held_by", "With --fix: whether all settings are restored; the result in words; the program that is using KSM"),
            ("fix.put_back[], fix.deferred[], fix.pending[], fix.left[], fix.failed[]", "Settings that were restored; that can be restored once nothing is merged; that are not restored yet; that others have changed; that could not be restored"),
            ("fix.put_back[].knob, fix.put_back[].value, fix.failed[].why", "A setting, its value, and why it could not be restored"),
        ],
    },
    Schema {
        name: "pagefold.sketch-summary/1",
        about: "Printed by pagefold sketch --json",
        fields: &[
            ("schema, host, key, file", "The host's name; 16 digits that tell which key was used; the file"),
            ("workloads[].kind, workloads[].workload, workloads[].domain", "A workload"),
            ("workloads[].anonymous_bytes, workloads[].read_bytes, workloads[].zero_bytes, workloads[].savable_bytes, workloads[].entries", "The workload's memory, as in the file; the number of contents in the sketch"),
        ],
    },
    Schema {
        name: "pagefold.history/1",
        about: "Printed by pagefold history --json; without --json the fields of moments are columns. The daemon keeps it in a binary file with a header of the same name",
        fields: &[
            ("schema, moments[].time", "A moment: RFC 3339, UTC; one a minute for a day, one for each quarter of an hour for 30 days"),
            ("moments[].pid, moments[].dry_run", "The run. A new pid is another run, whose CPU time begins at zero"),
            ("moments[].saved_bytes, moments[].marked_bytes, moments[].resident_bytes, moments[].available_bytes", "As in pagefold.status/1; saved is 0 in a dry run"),
            ("moments[].expected_bytes", "Memory in scope that we expect to be merged, with the copies that stay"),
            ("moments[].pagefold_cpu_seconds, moments[].ksmd_cpu_seconds", "CPU time since the run began"),
        ],
    },
    Schema {
        name: "pagefold.audit/1",
        about: "A line of the audit log: one for each span that is marked or unmarked, and one per cycle for each pair of processes with pages merged on request",
        fields: &[
            ("schema, time", "Time of writing: RFC 3339, UTC, at most a round after the change"),
            ("what", "begin, end, scope (the configuration has been read again, with another scope), mark, unmark, merge, override (of an opt-out), exclude, include, or lost (lines are missing here)"),
            ("command, version, scope, lost", "Of begin and end: the command, its version and scope. Of scope: the new one. Of exclude and include: the scope, and the uid of who asked. Of end and lost: the number of lines lost, in all or at this place"),
            ("pid, start_time_ticks, name, exe, uid, cgroup, domain", "The process. Pid and start time identify it"),
            ("first, last, bytes", "The range"),
            ("why.kind, why.sentence", "duplicate, cow-broken, charge, unmerged, asked, excluded, memory-short or opted-out; the reason as a sentence, with figures"),
            ("with_pid", "Of merge: the process whose pages stay; null for the zero page"),
            ("spans", "Of the 17th line about a process in a cycle: how many spans it sums up. The range contains them"),
            ("outcome, done_bytes", "done, busy (pagefold tries again) or refused; the bytes done"),
        ],
    },
    Schema {
        name: "pagefold.control/1",
        about: "A request to /run/pagefold/control.sock, a stream socket: one object a line, answered by one. Printed by pagefold governor, \
                pause and resume as the state after the change",
        fields: &[
            ("schema, request", "status, explain (with pid), workload (with selectors, to explain several processes), governor (with name), pause, resume, reload, unmerge or include (both with selectors)"),
            ("pid, name", "The process to explain; the governor to use"),
            ("pids, cgroups, users, exes, units, vms, containers, pods, all", "The processes to explain, unmerge or include"),
            ("pid, governor, in_force, allowed_share, paused", "Of an answer: the state after the change"),
            ("file, scope", "Of an answer to reload: the configuration file; the scope, as flags"),
            ("error, code", "Of an answer: the error and what to do; the exit code. The connection is closed"),
        ],
    },
];

/// Fails if the document has a field that its schema doesn't explain.
#[cfg(test)]
#[track_caller]
pub fn assert_explained(document: &serde_json::Value) {
    let schema = SCHEMAS.iter().find(|schema| document["schema"] == schema.name).expect("a schema of this module");
    let names: Vec<&str> = schema.names().collect();
    let mut values = vec![document];
    while let Some(value) = values.pop() {
        if let serde_json::Value::Array(rows) = value {
            values.extend(rows);
        }
        let serde_json::Value::Object(fields) = value else { continue };
        for (name, value) in fields {
            assert!(names.contains(&name.as_str()), "{name} of {} is not in reference.rs", schema.name);
            // The keys of this field are names of KSM's settings.
            if name != "knobs_deferred" {
                values.push(value);
            }
        }
    }
}
