//! `pagefold demo` on the real kernel: small and short, interrupted, and killed.

use std::time::Duration;

use pagefold_testkit::*;

/// The number before `word` in the first line that contains it.
#[track_caller]
fn mebibytes_before(text: &str, word: &str) -> u64 {
    let line = text.lines().find(|line| line.contains(word)).unwrap_or_else(|| panic!("no {word:?} in {text}"));
    let before = line.split(word).next().unwrap_or_default();
    before.split_ascii_whitespace().last().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

#[test]
fn every_part_is_shown_and_everything_is_restored() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let output = pagefold(&["demo", "--quick"]);
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{errors}");
    ksm.assert_restored();

    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    for number in 1..=6 {
        assert!(text.lines().any(|line| line.starts_with(&format!("{number}  "))), "part {number} is missing: {text}");
    }
    // Three workers hold the same 9.5 MiB, so 19 MiB can be saved, and 4.5 MiB of zeros in all.
    let held = mebibytes_before(&text, " MiB together");
    let savable = mebibytes_before(&text, " MiB of ");
    assert!(held == 46 && (23..=25).contains(&savable), "{text}");
    assert_eq!(mebibytes_before(&text, " MiB of data"), held);
    assert_eq!(mebibytes_before(&text, " MiB is intact"), held);
    let memory = text.lines().find(|line| line.contains("in memory") && line.contains("was")).unwrap();
    let words: Vec<&str> = memory.split_ascii_whitespace().collect();
    let (now, before, saved): (u64, u64, u64) =
        (words[2].parse().unwrap(), words[5].parse().unwrap(), words[8].parse().unwrap());
    // The kernel's figures for the workers' memory and for KSM's savings must agree.
    assert!(now < before && (before - now).abs_diff(saved) <= 2 && saved + 3 >= savable, "{memory}");
    assert!(text.contains("every KSM setting is restored"), "{text}");
}

#[test]
fn an_interrupted_demo_restores_everything() {
    let Some(ksm) = KsmAtRest::take() else { return };
    // These programs mark their own memory, and ksmd merges it, too.
    let mut bystanders = [Holder::with(2_048, 5), Holder::with(2_048, 5)];
    for holder in &mut bystanders {
        holder.mark(0, 2_048);
    }
    // At about these times it scans and merges.
    for milliseconds in [100, 700, 1500, 2000] {
        let mut demo = Daemon::start(&["demo", "--quick"]);
        wait_until("the workers start", || !demo.is_running() || !demo.children().is_empty());
        std::thread::sleep(Duration::from_millis(milliseconds));
        let children = demo.children();
        demo.signal(libc::SIGINT);
        let ended = demo.end();
        assert_eq!(ended.code, Some(1), "{}{}", ended.output, ended.errors);
        let says = "interrupted; KSM is restored and the workers have ended\n";
        assert!(ended.errors.ends_with(says), "{}", ended.errors);
        for child in children {
            assert!(!exists(child), "{child} is still there");
        }
        ksm.assert_restored();
    }
    assert!(bystanders.iter_mut().all(Holder::is_intact));
}

#[test]
fn what_a_killed_demo_leaves_is_restored_by_the_next() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut demo = Daemon::start(&["demo", "--quick"]);
    wait_until("ksmd runs", || !demo.is_running() || number("run") == 1);
    let children = demo.children();
    demo.kill();
    wait_until("the workers have ended", || !children.iter().any(|&child| exists(child)));
    assert_eq!(number("run"), 1, "there is nothing to restore");

    let output = pagefold(&["demo", "--quick"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    ksm.assert_restored();
}
