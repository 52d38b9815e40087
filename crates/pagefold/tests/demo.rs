//! `pagefold demo` on the real kernel: small and short, interrupted, and killed.

use std::time::Duration;

use pagefold_testkit::*;

/// The two numbers of a line like `Memory: 46 MiB -> 23 MiB`.
#[track_caller]
fn change_in(line: &str) -> (u64, u64) {
    let mut numbers = line.split_ascii_whitespace().filter_map(|word| word.parse().ok());
    let change = numbers.next().zip(numbers.next());
    change.unwrap_or_else(|| panic!("{line}"))
}

#[test]
fn every_part_is_shown_and_everything_is_restored() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let output = pagefold(&["demo", "--quick"]);
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{errors}");
    ksm.assert_restored();

    assert!(!text.contains('\x1b'), "{text}");
    for number in 1..=6 {
        assert!(text.lines().any(|line| line.starts_with(&format!("{number}  "))), "part {number} is missing: {text}");
    }
    for command in ["scan --exact", "run --governor full --for 6s", "unmerge"] {
        assert!(text.contains(&format!("\n$ pagefold {command} ")), "{text}");
    }
    // Three workers hold the same 9.5 MiB, so 19 MiB can be saved, and 4.5 MiB of zeros in all.
    assert!(text.contains("\n46 MiB together"), "{text}");
    assert_eq!(text.matches("Every byte is intact: 46 MiB of data").count(), 2, "{text}");
    let mut changes = text.lines().filter(|line| line.contains(" -> ")).map(change_in);
    let (before, merged) = changes.next().unwrap();
    let unmerged = changes.next().unwrap();
    assert!(before >= 46 && (21..=25).contains(&(before - merged)), "{text}");
    assert!(unmerged.0 == merged && unmerged.1.abs_diff(before) <= 1, "{text}");
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
    for (line, milliseconds) in [
        ("", 100),
        ("$ pagefold scan", 0),
        ("$ pagefold run", 300),
        ("$ pagefold run", 1500),
        ("$ pagefold unmerge", 50),
    ] {
        let mut demo = Daemon::start(&["demo", "--quick"]);
        wait_until("the workers start", || !demo.is_running() || !demo.children().is_empty());
        wait_until("this command starts", || !demo.is_running() || demo.has_printed(line));
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
fn a_killed_demo_is_restored_by_the_command_that_it_ran() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut demo = Daemon::start(&["demo", "--quick"]);
    wait_until("ksmd runs", || !demo.is_running() || number("run") == 1);
    let children = demo.children();
    assert!(children.len() > 3, "the workers and a command");
    demo.kill();
    wait_until("all have ended", || !children.iter().any(|&child| exists(child)));
    ksm.assert_knobs_restored();
}

#[test]
fn what_a_killed_demo_leaves_is_restored_by_the_next() {
    let Some(ksm) = KsmAtRest::take() else { return };
    let mut demo = Daemon::start(&["demo", "--quick"]);
    wait_until("ksmd runs", || !demo.is_running() || number("run") == 1);
    let children = demo.children();
    // Stop the demo first, so that it doesn't see its children die.
    demo.signal(libc::SIGSTOP);
    for &child in &children {
        send(child, libc::SIGKILL);
    }
    demo.kill();
    wait_until("the workers have ended", || !children.iter().any(|&child| exists(child)));
    assert_eq!(number("run"), 1, "there is nothing to restore");

    let output = pagefold(&["demo", "--quick"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    ksm.assert_restored();
}
