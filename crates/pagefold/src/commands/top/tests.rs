use super::activity::{Mood, describe};
use super::draw::{BLUE, GREEN, PURPLE, draw};
use super::html::{self, Sources};
use super::state::{Point, Rows, Sort, Top, View};
use super::{Answer, print_once, screen};
use crate::commands::explain::Explanation;
use crate::commands::status::Status;
use crate::commands::status::room::ReserveView;
use crate::golden::{self, NOW, Run};
use crate::history::Moment;
use crate::output::page::{Origin, escape};
use pagefold_engine::stops::StopLengths;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::{Color, Modifier};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

fn status(seconds: f64, saved_mib: u64, busy: bool) -> Value {
    let process = |pid: i32, name: &str, mib: u64, left_alone: Option<&str>| {
        let workload = match pid {
            10 | 11 => Some("vm web-1"),
            30 => Some("nginx.service"),
            _ => None,
        };
        json!({"pid": pid, "name": name, "workload": workload, "regions": 3, "resident_bytes": mib << 20,
            "unmerged_bytes": mib << 20, "marked_bytes": mib << 19, "expected_bytes": mib << 18, "left_alone": left_alone, "to_unmark": null})
    };
    let events = json!([
        {"time": 1, "what": "governor", "times": 1, "why": "low"},
        {"time": 2, "what": "mark", "pid": 40, "name": "gpg\u{1b}[2J\u{202e}", "times": 2, "done_bytes": 4 << 20,
            "bytes": 4 << 20, "why": "it is duplicate"},
    ]);
    let others = json!({
        "only": "all", "stood_down": false, "available_bytes": 0, "may_return_bytes": 0, "foreign_marks": false,
        "copied_bytes": 0, "copied_worst_day_bytes": 0, "reserve": ReserveView::default(),
        "splits": {"pages": 0, "mappings": 0}, "collapsed": 0, "refused_spans": 0, "injector_restarts": 0,
        "audit_lost": 0, "total_stop_us": 0.0, "stop_lengths": StopLengths::default(), "scopes": [], "left_out": [],
        "kept_out": [],
    });
    let mut status = json!({
        "schema": "pagefold.status/1", "pid": 7, "scope": "--all", "dry_run": false, "mechanism": "request",
        "seconds": seconds, "governor": "auto", "in_force": "low", "allowed_share": 0.2, "used_share": 0.05,
        "paused": false, "busy": busy, "ksm_driven": true, "ksm_why": null, "resident_bytes": 1000_u64 << 20,
        "unmerged_bytes": 1000_u64 << 20,
        "saved_bytes": saved_mib << 20, "saved_machine_bytes": saved_mib << 20, "exited_bytes": 0, "marked_bytes": 500_u64 << 20,
        "metadata_bytes": 1, "to_unmark_bytes": 0, "cpu_seconds": {"pagefold": 2.0, "injector": 0.0, "ksmd": 0.5}, "pages_read": 1_000_000,
        "scans": 0, "stops": 0, "longest_stop_us": 0.0, "rounds": 3, "index": {"contents": 5, "bytes": 100},
        "kinds": [{"kind": "statically-duplicated", "regions": 2, "resident_bytes": 700_u64 << 20}],
        "levels": [{"level": 4, "share": 0.1, "regions": 2, "resident_bytes": 700_u64 << 20}],
        "next": [{"what": "read", "regions": 2, "resident_bytes": 400_u64 << 20, "soonest_seconds": null}],
        "domains": [], "events": events,
        "processes": [
            process(10, "redis-server", 300, None),
            process(11, "redis-server", 300, None),
            process(30, "nginx", 400, None),
            process(40, "gpg\u{1b}[2J\u{202e}", 1, Some("it is on the deny list")),
        ],
    });
    status.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
    status
}

fn answer(status: Value) -> Answer {
    Answer {
        time: NOW,
        status: Ok(serde_json::from_value::<Status>(status).unwrap()),
        explanation: None,
        history: None,
    }
}

fn explanation(pid: i32) -> Explanation {
    let value = json!({"schema": "pagefold.explain/1", "pid": pid, "name": "a\u{1b}[2Jb", "exe": null, "in_scope": true,
        "scope": "", "left_alone": null, "paused": false, "dry_run": false, "levels": 4, "resident_bytes": 4096,
        "regions": [], "decisions": [], "excluded": [], "unseen_bytes": 0});
    serde_json::from_value(value).unwrap()
}

fn top() -> Top {
    let mut top = Top::new(false);
    top.update(answer(status(10.0, 100, true)));
    top.update(answer(status(12.0, 250, true)));
    top
}

fn press(top: &mut Top, keys: &[KeyCode]) {
    for &key in keys {
        top.key(KeyEvent::new(key, KeyModifiers::NONE));
    }
}

const NORMAL: (u16, u16) = (80, 24);

#[test]
fn the_figures_are_on_a_screen_of_eighty_columns() {
    golden::check("top-request.txt", &screen(&mut top(), NORMAL));
}

#[test]
fn rows_are_sorted_filtered_and_summed_up() {
    let mut top = top();
    let names = |top: &Top| top.rows().iter().map(|row| row.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&top)[..2], ["nginx", "redis-server"]);
    press(&mut top, &[KeyCode::Char('<')]);
    assert_eq!((top.sort, top.rows()[0].pid), (Sort::Pid, Some(10)));
    press(&mut top, &[KeyCode::Char('I')]);
    assert_eq!(top.rows()[0].pid, Some(40));
    press(&mut top, &[KeyCode::Char('I'), KeyCode::Char('>')]);
    press(&mut top, &[KeyCode::Char('/'), KeyCode::Char('W'), KeyCode::Char('e'), KeyCode::Char('b'), KeyCode::Enter]);
    assert_eq!(names(&top), ["redis-server"; 2], "by what they belong to");
    assert!(screen(&mut top, NORMAL).contains("only: Web"));
    press(&mut top, &[KeyCode::Char('t')]);
    let row = &top.rows()[0];
    assert_eq!(
        (top.rows_are, row.name.as_str(), row.processes, row.memory.unmerged_bytes),
        (Rows::Workload, "vm web-1", 2, 600 << 20)
    );
    press(&mut top, &[KeyCode::Enter]);
    assert_eq!((top.view, top.rows_are), (View::Programs, Rows::Process), "a workload has no regions");
    assert_eq!((top.filter.as_str(), top.rows().len()), ("vm web-1", 2), "but processes");
    press(&mut top, &[KeyCode::Char('t'), KeyCode::Esc]);
    assert_eq!(top.rows().len(), 3);
    press(&mut top, &[KeyCode::Char('/'), KeyCode::Char('-'), KeyCode::Enter, KeyCode::Enter]);
    assert_eq!((top.rows_are, names(&top)), (Rows::Process, vec!["gpg\u{1b}[2J\u{202e}".to_owned()]), "of no workload");
}

#[test]
fn the_chosen_row_stays_chosen_when_others_move() {
    let mut top = top();
    press(&mut top, &[KeyCode::Down, KeyCode::Down]);
    let mut later = status(13.0, 250, true);
    later["processes"][1]["unmerged_bytes"] = json!(900_u64 << 20);
    top.update(answer(later));
    press(&mut top, &[KeyCode::Enter]);
    assert_eq!(top.explained(), Some(11));
    top.update(Answer { explanation: Some(Ok(explanation(10))), ..answer(status(14.0, 1, true)) });
    assert!(top.explanation.is_none(), "of another process");
    press(&mut top, &[KeyCode::Esc, KeyCode::Char('q')]);
    assert!(top.is_over());
}

#[test]
fn a_sentence_says_whether_it_does_something_useful() {
    let at = |seconds: f64, saved: u64, cpu_ns: u64| Point { seconds, result_bytes: saved << 20, cpu_ns };
    let say = |value: Value, history: &[Point]| describe(&serde_json::from_value(value).unwrap(), history);
    let cost = 2_500_000_000;
    let (mood, text) = say(status(100.0, 250, true), &[at(40.0, 250, 0), at(100.0, 250, cost)]);
    assert_eq!((mood, text.contains("Nothing new in the last minute, for 2.5 s")), (Mood::Searching, true), "{text}");
    let (mood, text) = say(status(100.0, 250, false), &[at(40.0, 250, cost), at(100.0, 250, cost)]);
    assert_eq!((mood, text.trim()), (Mood::Idle, "Watching for changes, for 5.0 % of a core."));
    let (_, text) = say(status(100.0, 200, false), &[at(50.0, 250, cost), at(100.0, 200, cost)]);
    assert!(text.contains("50 MiB less saved"), "{text}");
    let mut paused = status(100.0, 200, true);
    paused["paused"] = json!(true);
    assert_eq!(say(paused, &[]).0, Mood::Idle);
}

#[test]
fn another_run_begins_a_new_curve() {
    let mut top = top();
    top.update(answer(status(1.0, 0, true)));
    assert_eq!(top.seen.len(), 1);
    top.update(Answer { time: NOW, status: Err("no pagefold is running".into()), explanation: None, history: None });
    assert!(screen(&mut top, NORMAL).contains("No answer: no pagefold is running"));
}

#[test]
fn no_size_and_no_name_breaks_the_screen() {
    for keys in [
        &[][..],
        &[KeyCode::Char('e')],
        &[KeyCode::Char('o')],
        &[KeyCode::Tab],
        &[KeyCode::Char('h')],
        &[KeyCode::Char('t')],
        &[KeyCode::Char('/')],
    ] {
        let mut top = top();
        press(&mut top, keys);
        for (width, height) in [(1, 1), (39, 11), (40, 12), (60, 13), NORMAL, (300, 100)] {
            let text = screen(&mut top, (width, height));
            assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text}");
        }
    }
    let mut top = top();
    press(&mut top, &[KeyCode::End, KeyCode::Enter]);
    assert_eq!(top.explained(), Some(40));
    assert!(screen(&mut top, NORMAL).contains("Asking the daemon"));
    top.update(Answer { explanation: Some(Err("only root may do that".into())), ..answer(status(13.0, 1, true)) });
    assert!(screen(&mut top, NORMAL).contains("only root may do that"));
    top.update(Answer { explanation: Some(Ok(explanation(40))), ..answer(status(14.0, 1, true)) });
    let text = screen(&mut top, NORMAL);
    assert!(text.contains("MAPPING") && !text.contains('\u{1b}'), "{text}");
}

#[test]
fn a_narrow_screen_loses_words_and_no_figures() {
    let mut top = top();
    for width in 40..=100 {
        let text = screen(&mut top, (width, 16));
        for figures in [" 250 MiB, 25 %", ", at most 20 %"] {
            let line = text.lines().find(|line| line.contains(figures)).unwrap_or_else(|| panic!("{width}: {text}"));
            assert!(line.contains("] "), "{line}");
        }
    }
    assert!(screen(&mut top, (36, 9)).contains("top needs 40 columns"));
}

#[test]
fn events_are_shown_with_the_newest_last() {
    let mut top = top();
    press(&mut top, &[KeyCode::Char('e')]);
    let text = screen(&mut top, NORMAL);
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part} in\n{text}"));
    assert!(at("the governor is low") < at("marked 4 MiB of gpg"), "{text}");
    press(&mut top, &[KeyCode::Up, KeyCode::Up, KeyCode::Up]);
    let text = screen(&mut top, NORMAL);
    assert!(text.contains("the governor is low") && !text.contains("marked 4 MiB"), "{text}");
    press(&mut top, &[KeyCode::Char('e')]);
    assert_eq!(top.view, View::Programs);
}

#[test]
fn the_history_is_a_chart_up_to_the_present() {
    let mut top = top();
    press(&mut top, &[KeyCode::F(3)]);
    let moment = |ago: u64, saved: u64| Moment { time: NOW - ago, saved_bytes: saved << 20, ..Moment::default() };
    top.history = Ok(vec![moment(7_000, 100), moment(6_940, 900), moment(60, 2_000)]);
    let text = screen(&mut top, NORMAL);
    for part in ["2 GiB", "-2 h", "saved, until now", "CPU time, until now"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert!(text.chars().filter(|letter| ('\u{2801}'..='\u{28ff}').contains(letter)).count() >= 3, "{text}");
    top.update(Answer { history: Some(Err("/h: is a directory".into())), ..answer(status(13.0, 250, true)) });
    assert!(screen(&mut top, NORMAL).contains("There is no history: /h: is a directory"));
}

#[test]
fn all_programs_are_printed_once() {
    let text = print_once(Top::new(false), Ok(serde_json::from_value(status(10.0, 100, true)).unwrap()));
    assert_eq!(text.lines().filter(|line| line.contains("redis-server")).count(), 2, "{text}");
    let mut top = Top::new(false);
    top.view = View::History;
    let history = print_once(top, Err("no pagefold is running".to_owned()));
    assert!(history.contains("The history has no entries") && history.contains("no pagefold is running"), "{history}");
    assert!(!text.contains("F1Help") && text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn a_thousand_programs_are_printed_once() {
    let mut status = status(10.0, 100, true);
    let programs = status["processes"].as_array_mut().unwrap();
    let program = programs[0].clone();
    programs.clear();
    for pid in 1..=1_000 {
        programs.push(program.clone());
        programs[pid - 1]["pid"] = json!(5_000_000 + pid);
    }
    let text = print_once(Top::new(false), Ok(serde_json::from_value(status).unwrap()));
    assert_eq!(text.lines().filter(|line| line.contains("redis-server")).count(), 1_000, "{text}");
}

/// A run that has been going for a while, and its status a minute ago.
fn watched() -> (Run, Status) {
    let mut run = Run::by_ksmd();
    run.seconds(60);
    let before = run.status();
    run.seconds(60);
    (run, before)
}

fn moments() -> Vec<Moment> {
    let moment = |ago: u64, saved: u64, cpu: u64| Moment {
        time: NOW - ago,
        pid: 7,
        saved_bytes: saved << 20,
        marked_bytes: saved << 21,
        expected_bytes: (saved * 3) << 19,
        available_bytes: (8_000 + saved) << 20,
        pagefold_ns: cpu * 1_000_000_000,
        ..Moment::default()
    };
    let first = (0..60).map(|minute| moment(7_000 - minute * 60, minute * 3, minute / 2));
    first.chain((0..20).map(|minute| moment(1_260 - minute * 60, 200, minute))).collect()
}

#[test]
fn every_view_has_its_golden_screens() {
    let (run, before) = watched();
    let answer = |status| Answer { time: NOW, status: Ok(status), explanation: None, history: None };
    for size in [(40, 12), (80, 24), (120, 40), (200, 50)] {
        let mut screens = Vec::new();
        for (view, keys) in [
            ("programs", &[][..]),
            ("workloads", &[KeyCode::Char('t')]),
            ("memory", &[KeyCode::Tab]),
            ("history", &[KeyCode::Char('o')]),
            ("events", &[KeyCode::Char('e')]),
            ("process", &[KeyCode::Down, KeyCode::Enter]),
            ("help", &[KeyCode::Char('h')]),
        ] {
            let mut top = Top::new(false);
            top.host = "host1".to_owned();
            top.history = Ok(moments());
            top.update(answer(before.clone()));
            top.update(answer(run.status()));
            press(&mut top, keys);
            if let Some(pid) = top.explained() {
                top.update(Answer { explanation: Some(Ok(run.explanation(pid))), ..answer(run.status()) });
            }
            screens.push(format!("-- {view}\n{}", screen(&mut top, size)));
        }
        golden::check(&format!("top-{}x{}.txt", size.0, size.1), &screens.concat());
    }
}

/// A colour of the fixed palette: 6 by 6 by 6 from 16 on.
fn rgb(index: u8) -> u32 {
    let level = |step: u32| if step == 0 { 0 } else { 55 + 40 * step };
    let place = u32::from(index) - 16;
    level(place / 36) << 16 | level(place / 6 % 6) << 8 | level(place % 6)
}

/// The relative luminance of a colour, as WCAG 2 defines it.
fn luminance(colour: u32) -> f64 {
    let part = |shift: u32| {
        let value = f64::from(colour >> shift & 0xff) / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * part(16) + 0.7152 * part(8) + 0.0722 * part(0)
}

#[test]
fn colours_have_a_contrast_of_3_on_dark_and_light_terminals() {
    // xterm, Solarized, GNOME and Ubuntu.
    for background in [0x00_0000, 0xff_ffff, 0x00_2b36, 0xfd_f6e3, 0x1e_1e1e, 0x30_0a24] {
        for colour in [GREEN, BLUE, PURPLE] {
            let Color::Indexed(index) = colour else { panic!("{colour:?} depends on the terminal") };
            let (one, other) = (luminance(rgb(index)), luminance(background));
            let contrast = (one.max(other) + 0.05) / (one.min(other) + 0.05);
            assert!(contrast >= 3.0, "{contrast:.2} for {colour:?} on {background:06x}");
        }
    }
}

/// The width and height of a character in the picture, pixels.
const CELL: (u16, u16) = (8, 17);

/// A screen as a picture (SVG).
fn picture(top: &mut Top, (width, height): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, top)).unwrap();
    let buffer = terminal.backend().buffer();
    let (right, bottom) = (width * CELL.0 + 16, height * CELL.1 + 16);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {right} {bottom}\" font-family=\"monospace\" font-size=\"13\">\n\
         <title>pagefold top</title>\n<rect width=\"{right}\" height=\"{bottom}\" rx=\"6\" fill=\"#14171c\"/>\n"
    );
    for y in 0..height {
        let mut x = 0;
        while x < width {
            let style = buffer[(x, y)].style();
            let mut text = String::new();
            let first = x;
            while x < width && buffer[(x, y)].style() == style {
                text += buffer[(x, y)].symbol();
                x += 1;
            }
            let reversed = style.add_modifier.contains(Modifier::REVERSED);
            let colour = match style.fg {
                Some(Color::Indexed(index)) => &*format!("#{:06x}", rgb(index)),
                _ if style.add_modifier.contains(Modifier::DIM) => "#98a2b3",
                _ => "#e6e9ef",
            };
            let (left, top, long) = (8 + first * CELL.0, 8 + y * CELL.1, (x - first) * CELL.0);
            if reversed {
                let high = CELL.1;
                let _ = writeln!(
                    svg,
                    "<rect x=\"{left}\" y=\"{top}\" width=\"{long}\" height=\"{high}\" fill=\"{colour}\"/>"
                );
            }
            if text.trim().is_empty() {
                continue;
            }
            let fill = if reversed { "#14171c" } else { colour };
            let _ = writeln!(
                svg,
                "<text x=\"{left}\" y=\"{}\" textLength=\"{long}\" xml:space=\"preserve\" fill=\"{fill}\">{}</text>",
                top + 13,
                escape(&text)
            );
        }
    }
    svg + "</svg>\n"
}

/// README.md shows this picture.
#[test]
fn the_picture_of_the_readme_is_the_screen() {
    let (run, before) = watched();
    let mut top = Top::new(true);
    top.host = "host1".to_owned();
    let answer = |status| Answer { time: NOW, status: Ok(status), explanation: None, history: None };
    top.update(answer(before));
    top.update(answer(run.status()));
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/top.svg");
    pagefold_testkit::golden::check(&file, &picture(&mut top, (100, 22)));
    let readme = std::fs::read_to_string(file.with_file_name("../README.md")).unwrap();
    assert!(readme.contains("](docs/top.svg)"));
}

#[test]
fn the_page_is_a_golden_file() {
    let (run, _) = watched();
    let (status, moments) = (run.status(), moments());
    let since = Duration::from_secs(7_200);
    let origin = Origin { host: "host1".to_owned(), time: NOW };
    let sources = Sources { status: Some(&status), moments: &moments, problem: None, since, origin };
    golden::check("top.html", &html::page(&sources));
    golden::check("top-ended.html", &html::page(&Sources { status: None, ..sources }));
}
