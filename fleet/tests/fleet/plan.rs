use crate::files::{MIB, NOW, fails, fleet, json, row, text, two_kinds, write};
use pagefold_sketch::Row;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Applies a plan: where each workload is, given where it was.
fn places(plan: &Value, mut places: BTreeMap<String, String>) -> BTreeMap<String, String> {
    for step in plan["steps"].as_array().unwrap() {
        for of in step["moves"].as_array().unwrap() {
            let place = places.insert(of["workload"].as_str().unwrap().into(), of["to"].as_str().unwrap().into());
            assert_eq!(place.as_deref(), of["from"].as_str());
        }
    }
    places
}

/// Writes four hosts with four workloads each, of four kinds. Returns where the workloads are.
fn mixed(dir: &Path, change: impl Fn(&mut Row)) -> BTreeMap<String, String> {
    let mut places = BTreeMap::new();
    for host in 0..4_u64 {
        let rows = (0..4_u64).map(|kind| {
            let own = 1_000_000 * (1 + 4 * host + kind);
            let mut row = row(&format!("k{kind}-{host}"), &[kind * 50_000..kind * 50_000 + 8_000, own..own + 4_000]);
            // The processors have room for four workloads: 80 % of half a core.
            row.host_memory_bytes = 300 * MIB;
            row.host_cpu_millicores = 500;
            change(&mut row);
            places.insert(row.workload.clone(), format!("h{host}"));
            row
        });
        write(dir, &format!("h{host}"), &rows.collect::<Vec<_>>());
    }
    places
}

fn kinds_by_host(places: &BTreeMap<String, String>) -> Vec<Vec<String>> {
    let mut hosts: BTreeMap<&String, Vec<String>> = BTreeMap::new();
    for (workload, host) in places {
        hosts.entry(host).or_default().push(workload[..2].into());
    }
    hosts.into_values().collect()
}

#[test]
fn like_workloads_are_put_together() {
    let dir = tempfile::tempdir().unwrap();
    let places_now = mixed(dir.path(), |_| ());
    let plan = json("plan", dir.path(), &[]);
    let then = places(&plan, places_now);
    for kinds in kinds_by_host(&then) {
        assert!(kinds.windows(2).all(|pair| pair[0] == pair[1]), "{then:?}");
    }
    // Each kind shares its 8,000 pages three times.
    let exact = 4.0 * 3.0 * 8_000.0 * 4096.0;
    let (after, error) = (plan["after"]["bytes"].as_f64().unwrap(), plan["after"]["error_bytes"].as_f64().unwrap());
    assert!((after - exact).abs() <= error, "{after} ± {error}, not {exact}");
    assert_eq!(plan["moves"].as_u64(), Some(12));
}

#[test]
fn moves_are_limited() {
    let dir = tempfile::tempdir().unwrap();
    mixed(dir.path(), |row| row.host_cpu_millicores = 16_000);
    for most in [0, 1, 2, 5] {
        let plan = json("plan", dir.path(), &["--moves", &most.to_string()]);
        let moves = plan["steps"].as_array().unwrap().iter().map(|step| step["moves"].as_array().unwrap().len());
        let moves = moves.sum::<usize>();
        assert!(moves <= most && plan["moves"] == moves, "{plan}");
        assert_eq!(moves == 0, most == 0, "{plan}");
        assert!(plan["after"]["bytes"].as_u64() >= plan["before"]["bytes"].as_u64());
    }
}

#[test]
fn memory_and_processors_limit_a_host() {
    let dir = tempfile::tempdir().unwrap();
    // There's just enough room for the workloads if nothing is shared. Sharing makes room for more.
    let now = mixed(dir.path(), |row| {
        row.host_memory_bytes = 4 * 12_000 * 4096 * 5 / 4 + MIB;
        row.host_cpu_millicores = 16_000;
    });
    let plan = json("plan", dir.path(), &[]);
    let then = places(&plan, now);
    assert!(plan["moves"].as_u64() > Some(0), "{plan}");
    for host in 0..4 {
        let here = || then.iter().filter(|(_, at)| **at == format!("h{host}")).map(|(name, _)| &name[..2]);
        let kinds: std::collections::BTreeSet<&str> = here().collect();
        let pages = 4_000 * here().count() + 8_000 * kinds.len();
        // The workloads may use 80 % of the memory, and a tenth more for the error of the estimated sharing.
        assert!(pages as f64 <= 4.0 * 12_000.0 * 1.1, "{then:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let now = mixed(dir.path(), |row| row.host_cpu_millicores = 500);
    let then = places(&json("plan", dir.path(), &[]), now);
    let mut on: BTreeMap<&String, u32> = BTreeMap::new();
    for host in then.values() {
        *on.entry(host).or_default() += 1;
    }
    // 80 % of half a core is enough for four workloads of a tenth each.
    assert!(on.values().all(|&workloads| workloads <= 4), "{on:?}");
}

#[test]
fn what_may_come_back_needs_room() {
    let dir = tempfile::tempdir().unwrap();
    mixed(dir.path(), |row| {
        row.host_memory_bytes = 260 * MIB;
        row.host_cpu_millicores = 16_000;
        row.take_back_bytes = 8_000 * 4096;
    });
    let plan = json("plan", dir.path(), &[]);
    // Since memory may come back, a host has room for only four workloads, as if nothing were shared.
    assert!(
        plan["steps"].as_array().unwrap().iter().all(|step| step["moves"].as_array().unwrap().len() == 2),
        "{plan}"
    );
}

/// A small workload lies: it claims all contents of a large one's sketch. They stand for as much memory as the large
/// one has.
#[test]
fn a_lie_does_not_overfill_a_host() {
    const PAGES: u64 = 100_000;
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, from: u64| {
        let mut row = row(name, &[from..from + PAGES]);
        // 80 % of this has room for two workloads and an eighth.
        row.host_memory_bytes = PAGES * 4096 * 17 / 8 * 5 / 4;
        row
    };
    let (w1, w3) = (of("w1", 0), of("w3", PAGES * 3 / 4));
    let hashes: Vec<u64> = w1.sketch.hashes().collect();
    // The sketch of a few contents, with all of these in it, in the library's form.
    let mut exact = vec![2, 3, 3, 0, 0, 0b1_1010, 0xcc, 0x93];
    exact.extend(u32::try_from(hashes.len()).unwrap().to_le_bytes());
    exact.extend([0; 4]);
    exact.extend(hashes.iter().flat_map(|hash| hash.to_le_bytes()));
    let lie = Row { sketch: pagefold_sketch::Sketch::from_bytes(&exact).unwrap(), ..row("x", &[0..4096]) };
    write(dir.path(), "h1", &[w1, of("w2", 1_000_000)]);
    write(dir.path(), "h2", &[w3, of("w4", 2_000_000)]);
    write(dir.path(), "evil", &[lie]);
    let plan = json("plan", dir.path(), &[]);
    let now = [("w1", "h1"), ("w2", "h1"), ("w3", "h2"), ("w4", "h2"), ("x", "evil")];
    let then = places(&plan, now.map(|(name, host)| (name.to_owned(), host.to_owned())).into());
    for host in ["h1", "h2"] {
        let large: Vec<&str> =
            now.map(|(name, _)| name)[..4].iter().copied().filter(|name| then[*name] == host).collect();
        assert!(large.len() <= 2, "{plan}");
    }
    // The liar has no more in common with the large workload than it holds itself.
    let report = json("report", dir.path(), &[]);
    for pair in report["pairs"].as_array().unwrap() {
        let held = pair["held_bytes"].as_f64().unwrap().min(pair["other_held_bytes"].as_f64().unwrap());
        assert!(pair["common_bytes"].as_f64().unwrap() <= held, "{pair}");
    }
}

#[test]
fn trust_domains_are_counted_apart() {
    let dir = tempfile::tempdir().unwrap();
    let own = |number: u64| 1_000_000 * number..1_000_000 * number + 100;
    for host in 0..2_u64 {
        let mut row = row(&format!("w{host}"), &[0..8_000, own(host + 1)]);
        row.domain = format!("tenant-{host}");
        write(dir.path(), &format!("h{host}"), &[row]);
    }
    let plan = json("plan", dir.path(), &[]);
    assert_eq!((&plan["moves"], &plan["after"]["bytes"]), (&Value::from(0), &Value::from(0)), "{plan}");
}

#[test]
fn rules_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let now = mixed(dir.path(), |_| ());
    let rules = dir.path().join("rules.toml");
    let text = "pinned = [\"k3-*\"]\n[[apart]]\nname = \"quorum\"\nworkloads = [\"k2-*\"]\n\
        [[together]]\nname = \"shop\"\nworkloads = [\"k0-0\", \"k1-0\"]\n\
        [[together]]\nname = \"spread\"\nworkloads = [\"k0-1\", \"k0-2\"]\n";
    std::fs::write(&rules, text).unwrap();
    let plan = json("plan", dir.path(), &["--rules", rules.to_str().unwrap()]);
    assert!(text_of(&plan["broken_rules"][0]).contains("it is on 2 hosts (h1, h2)"), "{plan}");
    let then = places(&plan, now.clone());
    for pinned in now.keys().filter(|name| name.starts_with("k3") || ["k0-1", "k0-2"].contains(&name.as_str())) {
        assert_eq!(then[pinned], now[pinned]);
    }
    let mut apart: Vec<&String> = (0..4).map(|host| &then[&format!("k2-{host}")]).collect();
    apart.sort();
    apart.dedup();
    assert_eq!(apart.len(), 4);
    assert_eq!(then["k0-0"], then["k1-0"]);
    assert!(plan["moves"].as_u64() > Some(0) && text_of(&plan["broken_rules"][0]).contains("spread"), "{plan}");
    // If two groups have a workload in common, moving one group would pull the other apart.
    let text = "[[together]]\nname = \"shop\"\nworkloads = [\"k0-0\", \"k1-0\"]\n\
        [[together]]\nname = \"till\"\nworkloads = [\"k1-0\", \"k2-0\"]\n";
    std::fs::write(&rules, text).unwrap();
    let plan = json("plan", dir.path(), &["--rules", rules.to_str().unwrap()]);
    let then = places(&plan, now.clone());
    assert!(["k0-0", "k1-0", "k2-0"].iter().all(|name| then[*name] == "h0"), "{then:?}");
    assert!(plan["moves"].as_u64() > Some(0) && plan["broken_rules"].as_array().unwrap().len() == 2, "{plan}");
    std::fs::write(&rules, "pin = []").unwrap();
    let arguments = ["plan", dir.path().to_str().unwrap(), "--rules", rules.to_str().unwrap()];
    assert!(fails(&fleet(&arguments).output().unwrap(), 2).contains("line 1"));
}

fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[test]
fn units_of_a_host_are_not_moved() {
    let dir = tempfile::tempdir().unwrap();
    mixed(dir.path(), |row| row.kind = pagefold_sketch::Kind::Unit);
    assert_eq!(json("plan", dir.path(), &[])["moves"], 0);
}

#[test]
fn orchestrators_get_labels_and_tags() {
    let dir = tempfile::tempdir().unwrap();
    mixed(dir.path(), |_| ());
    let of = |flag: &str| -> Value {
        let output = fleet(&["plan", dir.path().to_str().unwrap(), "--at", NOW, flag]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let labels = of("--kubernetes");
    assert_eq!((labels["nodes"].as_array().unwrap().len(), labels["pods"].as_array().unwrap().len()), (4, 16));
    let pod = &labels["pods"][0];
    let term = &pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"];
    assert_eq!(term["labelSelector"]["matchLabels"], pod["labels"]);
    assert_eq!(term["topologyKey"], "kubernetes.io/hostname");
    // Proxmox VE gets no tags, because these are pods.
    assert_eq!(of("--proxmox")["guests"].as_array().unwrap().len(), 0);
    mixed(dir.path(), |row| row.kind = pagefold_sketch::Kind::Vm);
    let tags = of("--proxmox");
    let guests = tags["guests"].as_array().unwrap();
    assert_eq!(guests.len(), 16);
    for guest in guests {
        let same_tag = guests.iter().filter(|other| other["tags"] == guest["tags"]);
        assert_eq!(guest["migrate"], guest["from"] != guest["node"]);
        assert!(same_tag.clone().all(|other| other["node"] == guest["node"]) && same_tag.count() == 4, "{tags}");
    }
}

#[test]
fn a_promise_is_verified() {
    let dir = tempfile::tempdir().unwrap();
    let now = mixed(dir.path(), |_| ());
    let plan = json("plan", dir.path(), &[]);
    let file = dir.path().join("plan.json");
    std::fs::write(&file, plan.to_string()).unwrap();
    let verify = |dir: &Path| json("verify", dir, &[file.to_str().unwrap()]);
    let before = verify(dir.path());
    assert_eq!(
        (&before["moves"], &before["made"], &before["gone"]),
        (&Value::from(12), &Value::from(0), &Value::from(0))
    );
    // We make all moves and save what was promised, except on one host whose file is missing, and for a workload that
    // has ended.
    let then = places(&plan, now);
    let later = tempfile::tempdir().unwrap();
    for host in 0..3 {
        let host = format!("h{host}");
        let here = then.iter().filter(|(name, at)| **at == host && *name != "k0-0");
        let mut rows: Vec<Row> = here.map(|(name, _)| row(name, &[0..10])).collect();
        rows[0].saved_bytes = 90 * MIB;
        write(later.path(), &host, &rows);
    }
    let after = verify(later.path());
    let hosts = after["hosts"].as_array().unwrap();
    let promised = 3 * 8_000 * 4096;
    assert!(
        hosts.iter().all(|host| host["promised_bytes"].as_u64().unwrap().abs_diff(promised) < promised / 10),
        "{after}"
    );
    assert_eq!(hosts.iter().filter(|host| host["saved_bytes"] == 90 * MIB).count(), 3);
    assert_eq!(hosts.iter().filter(|host| host["saved_bytes"].is_null()).count(), 1);
    assert!(after["made"].as_u64() >= Some(8) && after["gone"].as_u64() > Some(0), "{after}");
    for bad in
        ["", "{}", "[1]", "{\"schema\": \"pagefold.fleet.plan/9\"}", &plan.to_string().replace("plan/1", "plan/2")]
    {
        std::fs::write(&file, bad).unwrap();
        let arguments = ["verify", file.to_str().unwrap(), dir.path().to_str().unwrap(), "--at", NOW];
        assert!(fails(&fleet(&arguments).output().unwrap(), 1).contains("plan --json"), "{bad}");
    }
}

#[test]
fn a_plan_is_text_for_people() {
    let dir = tempfile::tempdir().unwrap();
    two_kinds(dir.path());
    let output = fleet(&["plan", dir.path().to_str().unwrap(), "--at", NOW]).output().unwrap();
    let text = text(&output.stdout);
    for part in ["STEP", "SAVES", "of 6 workloads are moved"] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}
