//! `pagefold-lab scale`: its results on a small scale and refused arguments.

mod common;

use common::{assert_lab_fails, lab};
use serde_json::Value;

fn scale(options: &[&str]) -> String {
    let output = lab(&[&["scale"], options].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The entry for an algorithm.
fn of<'a>(entries: &'a Value, algorithm: &str) -> Vec<&'a Value> {
    entries.as_array().unwrap().iter().filter(|entry| entry["algorithm"] == algorithm).collect()
}

#[test]
fn all_parts_on_a_small_scale() {
    let json = scale(&["--quick", "--json"]);
    let scaling: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(scaling["schema"], "pagefold.lab.scale/1");
    // Two memory sizes and six algorithms, one of them also at the kernel's default rate.
    assert_eq!(scaling["growth"].as_array().unwrap().len(), 14);
    let reached = |growth: &Value| growth["reached_seconds"].as_f64().unwrap();
    let (pagefold, ksm) = (of(&scaling["growth"], "pagefold"), of(&scaling["growth"], "ksm"));
    for (pagefold, ksm) in pagefold.iter().zip(&ksm) {
        assert_eq!((&pagefold["gib"], &pagefold["savable_bytes"].is_u64()), (&ksm["gib"], &true));
        assert!(pagefold["curve"][0].is_array() && ksm["curve"][0].is_array());
        assert!(pagefold["index_bytes"].as_u64() > Some(0) && ksm["index_bytes"] == 0);
    }
    assert!(reached(pagefold[0]) < reached(ksm[0]) && reached(pagefold[1]) > reached(pagefold[0]));
    for check in scaling["grain"].as_array().unwrap() {
        // In half a minute one walk more or less is a large part of pagefold's comparisons: only its savings must
        // agree.
        let name = if check["algorithm"].as_str().unwrap().starts_with("pagefold") {
            "saved on average"
        } else {
            "comparisons"
        };
        for figure in check["figures"].as_array().unwrap().iter().filter(|figure| figure["name"] == name) {
            let (fine, coarse) = (figure["fine"].as_f64().unwrap(), figure["coarse"].as_f64().unwrap());
            assert!((coarse / fine - 1.0).abs() < 0.1, "{check}");
        }
    }
    for point in scaling["forests"].as_array().unwrap() {
        let missed = point["stable"].as_f64().unwrap() - point["law"].as_f64().unwrap();
        assert!(missed.abs() < 0.6 && point["lost"] == 0, "{point}");
    }
    let races = scaling["races"].as_array().unwrap();
    assert_eq!(races.len(), 2);
    for race in races {
        assert_eq!(of(&race["racers"], "pagefold")[0]["exhausted_seconds"], Value::Null);
        assert!(race["racers"][0]["exhausted_seconds"].as_f64() > Some(800.0), "without merging");
        assert!(race["racers"].as_array().unwrap().iter().all(|racer| racer["curve"][9].is_array()), "{race}");
    }
    // The thesis has the same outcome, where comparisons are costly.
    let exhausted = |algorithm| of(&races[1]["racers"], algorithm)[0]["exhausted_seconds"].is_number();
    assert!(exhausted("ksm") && !exhausted("nuksm"));
}

#[test]
fn parts_and_sizes_can_be_chosen() {
    let text = scale(&["--quick", "--only", "growth", "--memory", "2", "--algorithm", "uksm,nuksm", "--hours", "0.02"]);
    assert!(text.starts_with("Growing memory"), "{text}");
    let row = |name: &str| text.lines().filter(|line| line.contains(&format!(" {name} "))).count();
    assert_eq!((row("uksm"), row("nuksm"), row("ksm"), row("pagefold")), (1, 1, 0, 0), "{text}");
    assert!(!text.contains("The race") && !text.contains("Forests"), "{text}");
    let text = scale(&["--quick", "--only", "forests"]);
    assert!(text.starts_with("Forests") && text.contains("The largest deviation from the law is 0."), "{text}");
}

#[test]
fn invalid_arguments_are_refused() {
    assert_lab_fails(&["scale", "--memory", "0"], 2, "--memory");
    assert_lab_fails(&["scale", "--hours=-1"], 2, "0.01 to 168");
    assert_lab_fails(&["scale", "--hours", "1000"], 2, "0.01 to 168");
    assert_lab_fails(&["scale", "--algorithm", "xlh"], 2, "there is no algorithm 'xlh'");
    assert_lab_fails(&["scale", "--only", "parity"], 2, "--only");
}
