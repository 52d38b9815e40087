//! Draws the screen.

use super::activity::{self, Mood};
use super::over_time;
use super::state::{Point, Rows, Sort, Top, View};
use crate::commands::status::{Status, saved_size, size};
use crate::output::page::clock;
use pagefold_engine::decision::Kind;
use pagefold_engine::governor::Governor;
use pagefold_engine::units::Pages;
use pagefold_text::escape::printable;
use pagefold_text::figures::{time, wrap};
use pagefold_text::style::{bar, human, percent, shorten};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Sparkline, Table, TableState};

/// The smallest readable screen: columns and rows.
const SMALLEST: (u16, u16) = (40, 12);
/// The width of the bars at the top of the screen, and their least width: if less is left, we use a shorter text.
const BAR: usize = 24;
const BAR_LEAST: usize = 8;
/// The width of a bar's name, brackets and spaces.
const BESIDE_BAR: usize = 10;
const CURVE_ROWS: u16 = 3;
/// The width of the bar in a row of the table.
const ROW_BAR: u16 = 10;

const HELP: [(&str, &str); 16] = [
    ("Arrows, Page, End", "choose a row"),
    ("Enter", "a process region by region, with reason and next step; a workload's processes"),
    ("Esc", "go back; clear the filter"),
    ("Tab, F2", "kinds of memory, and next steps; and back"),
    ("o, F3", "the savings over time, from the history; and back"),
    ("/, F4", "show only rows with this text in the name, the workload or the pid"),
    ("t, F5", "a row for each process, or for each workload (VM, container, pod, systemd unit)"),
    ("> <, F6", "sort by the next column, or the previous one"),
    ("e, F7", "the daemon's latest actions; and back"),
    ("I", "reverse the order"),
    ("h, ?, F1", "this help"),
    ("q, F10, Ctrl-C", "quit; the daemon keeps running"),
    ("MEMORY", "its memory if nothing were merged; frames shared through fork are divided among processes"),
    ("SAVED", "its part of the savings; \"counting\" until we know"),
    ("MARKED", "memory that ksmd may merge, or with pages merged on request"),
    ("DUPLICATE", "the part expected to be merged, including the copy that stays"),
];
/// The width of the keys' names in the help.
const KEYS: usize = 19;
/// From this width on, we show the latest events beside the programs.
const WIDE: u16 = 160;
const EVENTS: u16 = 64;

// These can be read on dark and on light terminals. We take them from the fixed part of the palette: terminals draw the
// first 16 colours as they like, and most draw green and cyan too bright for a white background.
pub const GREEN: Color = Color::Indexed(64);
pub const BLUE: Color = Color::Indexed(31);
pub const PURPLE: Color = Color::Indexed(133);

/// Chooses styles. Without colour they're plain.
#[derive(Clone, Copy)]
pub struct Look(bool);

impl Look {
    pub fn of(self, colour: Color) -> Style {
        if self.0 { Style::new().fg(colour) } else { Style::new() }
    }

    pub fn good(self) -> Style {
        self.of(GREEN)
    }

    pub fn warn(self) -> Style {
        self.of(PURPLE)
    }

    pub fn dim() -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn chosen() -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    fn kind(self, kind: Kind) -> Style {
        match kind {
            Kind::StaticallyDuplicated => self.good(),
            Kind::CowBroken | Kind::ShortLived => self.warn(),
            Kind::Sparse => self.of(BLUE),
            Kind::Unknown => Self::dim(),
        }
    }
}

pub fn draw(frame: &mut Frame, top: &mut Top) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        let (columns, rows) = SMALLEST;
        let text = format!("Too small: top needs {columns} columns and {rows} rows. q: quit");
        say(frame, area, &text, Style::new());
        return;
    }
    let look = Look(top.colour);
    let heights = [Constraint::Length(1), Constraint::Length(8), Constraint::Min(3), Constraint::Length(1)];
    let [title, figures, body, keys] = Layout::vertical(heights).areas(area);
    if let Some(status) = &top.status {
        frame.render_widget(heading(top, status, title.width).style(Look::chosen()), title);
        if top.view != View::Help {
            draw_figures(frame, figures, status, top, look);
        }
    } else if let Some(problem) = &top.problem {
        frame.render_widget(
            Line::styled(format!("{:<width$}", " pagefold", width = title.width.into()), Look::chosen()),
            title,
        );
        say(frame, figures, problem, look.warn());
    }
    match top.view {
        View::Programs if body.width >= WIDE => {
            let [left, right] = Layout::horizontal([Constraint::Min(1), Constraint::Length(EVENTS)]).areas(body);
            programs(frame, left, top, look);
            events(frame, right, top);
        }
        View::Programs => programs(frame, body, top, look),
        View::Memory => memory(frame, body, top, look),
        View::History => over_time::draw(frame, body, top, look),
        View::Events => events(frame, body, top),
        View::Process(_) => process(frame, body, top, look),
        View::Help => help(frame, figures.union(body)),
    }
    frame.render_widget(key_bar(top, keys.width), keys);
}

fn heading(top: &Top, status: &Status, width: u16) -> Line<'static> {
    let mechanism = status.run.merging();
    let governor = match status.activity.governor {
        Governor::Auto => format!("governor auto, now {}", status.activity.in_force),
        governor => format!("governor {governor}"),
    };
    let text = format!(" pagefold   up {}   {mechanism}   {governor}", time(status.activity.seconds));
    let clock = clock(top.now);
    let right = format!("{}  {} ", shorten(&top.host, 20), clock.split_once(' ').map_or("", |(_, time)| time));
    let width = usize::from(width);
    let room = width.saturating_sub(right.chars().count() + 1);
    if room < text.chars().count().min(width / 2) {
        return Line::raw(format!("{:<width$}", shorten(&text, width)));
    }
    Line::raw(format!("{:<room$} {right}", shorten(&text, room)))
}

fn draw_figures(frame: &mut Frame, area: Rect, status: &Status, top: &Top, look: Look) {
    let heights = [Constraint::Length(2), Constraint::Length(CURVE_ROWS), Constraint::Length(2), Constraint::Length(1)];
    let [bars, curve, doing, _] = Layout::vertical(heights).areas(area);
    let name = if status.run.dry_run { "Found" } else { "Saved" };
    let whole_bytes = status.memory.unmerged_bytes;
    let whole = human(whole_bytes);
    let of = format!("{whole} in {}", status.count(status.programs.looked_at()));
    let result = status.result_bytes();
    let share = result.unwrap_or(0) as f64 / whole_bytes.max(1) as f64;
    let saved = match result {
        Some(bytes) => format!("{}, {}", human(bytes), percent(share, 1.0)),
        None => "counting".to_owned(),
    };
    let joint = if result.is_some() { " of" } else { ";" };
    let saved = [format!("{saved}{joint} {of}"), format!("{saved}{joint} {whole}"), saved];
    let used = status.activity.used_share;
    let allowed = status.activity.allowed_share.fraction();
    let (now, most) = (percent(used, 1.0), percent(allowed, 1.0));
    let cpu = [format!("{now} of a core, at most {most}"), format!("{now}, at most {most}")];
    let room = usize::from(bars.width).saturating_sub(BESIDE_BAR);
    let saved = longest_beside_bar(&saved, room);
    let cpu = longest_beside_bar(&cpu, room);
    let bar = room.saturating_sub(saved.chars().count().max(cpu.chars().count())).min(BAR);
    let lines = vec![
        gauge(name, share, bar, look.good(), saved),
        gauge("CPU", used / allowed.max(1e-4), bar, look.of(BLUE), cpu),
    ];
    frame.render_widget(Paragraph::new(lines), bars);
    draw_curve(frame, curve, &top.seen, look);
    let (mood, text) = match &top.problem {
        Some(problem) => (Mood::Searching, format!("No answer: {problem}")),
        None => activity::describe(status, &top.seen),
    };
    let style = match mood {
        Mood::Useful => look.good(),
        Mood::Idle => Style::new(),
        Mood::Searching => look.warn(),
    };
    say(frame, doing, &text, style);
}

/// The longest of these texts that leaves room for a bar, or else the last. The texts are sorted from long to short.
fn longest_beside_bar(texts: &[String], room: usize) -> &str {
    let fits = |text: &&String| text.chars().count() + BAR_LEAST <= room;
    texts.iter().find(fits).or(texts.last()).map_or("", String::as_str)
}

/// A bar that shows a share, between its name and a text.
fn gauge(name: &str, share: f64, width: usize, style: Style, text: &str) -> Line<'static> {
    let filled = bar(share, width);
    let empty = " ".repeat(width - filled.chars().count());
    Line::from(vec![
        Span::styled(format!(" {name:<6}"), Look::dim()),
        Span::raw("["),
        Span::styled(filled, style),
        Span::raw(format!("{empty}] ")),
        Span::raw(text.to_owned()),
    ])
}

/// Draws a text, wrapped at the area's width.
pub fn say(frame: &mut Frame, area: Rect, text: &str, style: Style) {
    let lines = wrap(&printable(text.as_bytes()), usize::from(area.width).saturating_sub(2));
    let lines: Vec<Line> = lines.into_iter().map(|line| Line::styled(format!(" {line}"), style)).collect();
    frame.render_widget(Paragraph::new(lines), area);
}

/// Draws all savings in `history`, with as many seconds per column as needed to fit the width.
fn draw_curve(frame: &mut Frame, area: Rect, history: &[Point], look: Look) {
    let [label, curve] = Layout::horizontal([Constraint::Length(8), Constraint::Min(1)]).areas(area);
    let (Some(first), Some(last)) = (history.first(), history.last()) else { return };
    let columns = usize::from(curve.width).max(1);
    let most = history.iter().map(|point| point.result_bytes).max().unwrap_or(0);
    let step = history.len().div_ceil(columns).max(1);
    let mut values = Vec::new();
    for points in history.rchunks(step).rev() {
        values.extend(points.last().map(|point| point.result_bytes));
    }
    let labels = vec![
        Line::raw(format!("{:>7}", human(most))),
        Line::raw(""),
        Line::raw(format!("{:>7}", time(last.seconds - first.seconds))),
    ];
    frame.render_widget(Paragraph::new(labels).style(Look::dim()), label);
    frame.render_widget(Sparkline::default().data(&values).max(most.max(1)).style(look.good()), curve);
}

fn right(text: String) -> Cell<'static> {
    Cell::new(Line::raw(text).right_aligned())
}

/// A column's title, which shows whether we sort by this column.
fn title(top: &Top, sort: Sort, text: &str) -> String {
    match (top.sort == sort, top.reversed) {
        (true, true) => format!("{text}▲"),
        (true, false) => format!("{text}▼"),
        (false, _) => text.to_owned(),
    }
}

struct Column {
    title: Cell<'static>,
    width: Constraint,
    /// We leave the column out on screens narrower than this.
    from_width: u16,
}

fn programs(frame: &mut Frame, area: Rect, top: &mut Top, look: Look) {
    let of_processes = top.rows_are == Rows::Process;
    let number = if of_processes { title(top, Sort::Pid, "PID") } else { "PROCESSES".to_owned() };
    let name = title(top, Sort::Name, if of_processes { "PROGRAM" } else { "WORKLOAD" });
    // On a narrow screen we shorten workloads' names, so that figures fit.
    let name_width = if of_processes { 16 } else { area.width.saturating_sub(52).clamp(10, 44) };
    let figure = |sort, name, width, from_width| Column {
        title: right(title(top, sort, name)),
        width: Constraint::Length(width),
        from_width,
    };
    let columns = [
        Column { title: right(number), width: Constraint::Length(9), from_width: 0 },
        Column { title: Cell::new(name), width: Constraint::Length(name_width), from_width: 0 },
        figure(Sort::Memory, "MEMORY", 9, 47),
        figure(Sort::Saved, "SAVED", 9, 0),
        Column { title: right("SHARE".to_owned()), width: Constraint::Length(6), from_width: 90 },
        Column { title: Cell::new(""), width: Constraint::Length(ROW_BAR), from_width: 103 },
        figure(Sort::Marked, "MARKED", 9, 78),
        figure(Sort::Duplicate, "DUPLICATE", 11, 68),
        Column {
            title: Cell::new(if of_processes { "BELONGS TO" } else { "" }),
            width: Constraint::Min(8),
            from_width: 56,
        },
    ];
    let rest = width_left(&columns, area.width);
    let mut rows = Vec::new();
    let all = top.rows();
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let most = all.iter().filter_map(|row| row.saved_bytes).max().unwrap_or(0).max(1) as f64;
    for row in all {
        let number = row.pid.map_or(row.processes.to_string(), |pid| pid.to_string());
        let last = match (&row.left_alone, row.pid) {
            (Some(why), _) => {
                let why = format!("left alone: {}", printable(why.as_bytes()));
                Cell::new(shorten(&why, rest.into())).style(Look::dim())
            }
            (None, Some(_)) => Cell::new(shorten(&row.workload, rest.into())),
            (None, None) => Cell::new(""),
        };
        let cells = [
            right(number),
            Cell::new(shorten(&printable(row.name.as_bytes()), name_width.into())),
            right(size(row.memory.unmerged_bytes)),
            right(saved_size(row.saved_bytes)).style(bold),
            right(row.saved_share()),
            Cell::new(bar(row.saved_bytes.unwrap_or(0) as f64 / most, ROW_BAR.into())).style(look.good()),
            right(size(row.memory.marked_bytes)),
            right(size(row.memory.expected_bytes)),
            last,
        ];
        rows.push(fitting(cells, &columns, area.width));
    }
    draw_table(frame, area, columns, rows, &mut top.table);
}

/// The width that's left for the last column.
fn width_left(columns: &[Column], width: u16) -> u16 {
    let mut rest = width;
    for column in columns.iter().filter(|column| width >= column.from_width) {
        if let Constraint::Length(width) = column.width {
            rest = rest.saturating_sub(width + 1);
        }
    }
    rest
}

/// The cells of the columns that we show on a screen of this width.
fn fitting<'a, const N: usize>(cells: [Cell<'a>; N], columns: &[Column; N], width: u16) -> TableRow<'a> {
    let shown = cells.into_iter().zip(columns).filter(|(_, column)| width >= column.from_width);
    TableRow::new(shown.map(|(cell, _)| cell))
}

fn draw_table<const N: usize>(
    frame: &mut Frame,
    area: Rect,
    columns: [Column; N],
    rows: Vec<TableRow>,
    state: &mut TableState,
) {
    let mut header = Vec::new();
    let mut widths = Vec::new();
    for column in columns.into_iter().filter(|column| area.width >= column.from_width) {
        header.push(column.title);
        widths.push(column.width);
    }
    let header = TableRow::new(header).style(Style::new().add_modifier(Modifier::BOLD));
    let table = Table::new(rows, widths).header(header).row_highlight_style(Look::chosen());
    frame.render_stateful_widget(table, area, state);
}

fn memory(frame: &mut Frame, area: Rect, top: &Top, look: Look) {
    let Some(status) = &top.status else { return };
    let all = status.memory.resident_bytes;
    let bold = Style::new().add_modifier(Modifier::BOLD);
    // On a narrow screen we shorten the names, so that figures fit.
    let name_width = usize::from(area.width).saturating_sub(30).clamp(8, 22);
    let head = format!(" {:<name_width$}    MEMORY   SHARE  REGIONS", "KIND");
    let mut lines = vec![Line::styled(head, bold)];
    for row in &status.totals.kinds {
        lines.push(total(name_width, &row.kind.to_string(), row.resident, row.regions, all, look.kind(row.kind)));
    }
    lines.push(Line::styled(" WHAT HAPPENS NEXT", bold));
    for row in &status.totals.next {
        let when = row.soonest_seconds.map_or(String::new(), |seconds| format!(", first in {}", time(seconds)));
        let name = format!("{}{when}", row.verb);
        lines.push(total(name_width, &name, row.resident, row.regions, all, look.of(BLUE)));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// A line of a table about one part of the memory, with its share of all.
fn total(width: usize, name: &str, resident: Pages, regions: usize, all_bytes: u64, style: Style) -> Line<'static> {
    let bytes = resident.bytes().0;
    let share = bytes as f64 / all_bytes.max(1) as f64;
    let name = shorten(name, width);
    let figures = format!(" {name:<width$} {:>9} {:>7} {regions:>8}  ", size(bytes), percent(share, 1.0));
    Line::from(vec![Span::raw(figures), Span::styled(bar(share, BAR), style)])
}

fn process(frame: &mut Frame, area: Rect, top: &mut Top, look: Look) {
    let explanation = match &top.explanation {
        Some(Ok(explanation)) => explanation,
        Some(Err(problem)) => return say(frame, area, problem, look.warn()),
        None => return say(frame, area, "Asking the daemon ...", Style::new()),
    };
    let heights = [Constraint::Length(1), Constraint::Min(2), Constraint::Length(3)];
    let [title, body, sentence] = Layout::vertical(heights).areas(area);
    // The name may differ from the executable: Debian's redis-server runs /usr/bin/redis-check-rdb.
    let exe = explanation.exe.as_ref().map_or(String::new(), |exe| format!(" ({exe})"));
    let note = match &explanation.left_alone {
        Some(why) => format!(", left alone: {why}"),
        None if !explanation.in_scope => ": it has ended, or is no longer in scope".to_owned(),
        None => String::new(),
    };
    let resident = human(explanation.resident_bytes);
    let text = format!(" {} {}{exe}, {resident}{note}", explanation.pid, explanation.name);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Line::styled(shorten(&printable(text.as_bytes()), title.width.into()), bold), title);
    let columns = [
        Column { title: Cell::new("MAPPING"), width: Constraint::Min(16), from_width: 0 },
        Column { title: right("MEMORY".into()), width: Constraint::Length(8), from_width: 0 },
        Column { title: right("DUPLICATE".into()), width: Constraint::Length(9), from_width: 0 },
        Column { title: right("MARKED".into()), width: Constraint::Length(8), from_width: 54 },
        Column { title: Cell::new("KIND"), width: Constraint::Length(21), from_width: 76 },
        Column { title: Cell::new("NEXT"), width: Constraint::Length(8), from_width: 45 },
    ];
    let mut rows = Vec::new();
    for row in &explanation.regions {
        let name = row.file.as_ref().unwrap_or(&row.mapping);
        let mut ratio = percent(row.figures.duplicate_ratio, 1.0);
        if !row.figures.is_known() {
            "not known".clone_into(&mut ratio);
        } else if !row.figures.exact {
            ratio.insert(0, '~');
        }
        let cells = [
            Cell::new(printable(name.as_bytes())),
            right(size(row.figures.resident.bytes().0)),
            right(ratio),
            right(size(row.figures.marked.bytes().0)),
            Cell::new(row.figures.kind.to_string()).style(look.kind(row.figures.kind)),
            Cell::new(row.next.clone()),
        ];
        rows.push(fitting(cells, &columns, body.width));
    }
    let chosen = top.regions.selected().and_then(|at| explanation.regions.get(at));
    let said = chosen.map_or(String::new(), |row| format!("{}: {}", row.range, row.sentence));
    say(frame, sentence, &said, Style::new());
    draw_table(frame, body, columns, rows, &mut top.regions);
}

fn events(frame: &mut Frame, area: Rect, top: &Top) {
    let Some(status) = &top.status else { return };
    let shown = status.events.len().saturating_sub(top.events_below);
    let events = &status.events[..shown];
    let mut lines: Vec<Line> = Vec::new();
    let width = usize::from(area.width).saturating_sub(14).max(20);
    // We start from the newest event and show as many as fit.
    for event in events.iter().rev() {
        let ago = format!("{:>11} ", format!("-{}", time(top.now.saturating_sub(event.time) as f64)));
        let text = printable(event.sentence(status.run.dry_run).as_bytes());
        for (at, line) in wrap(&text, width).into_iter().enumerate().rev() {
            let when = if at == 0 { ago.clone() } else { " ".repeat(ago.len()) };
            lines.push(Line::from(vec![Span::styled(when, Look::dim()), Span::raw(line)]));
        }
        if lines.len() >= area.height.into() {
            break;
        }
    }
    lines.truncate(area.height.into());
    lines.reverse();
    if events.is_empty() {
        lines.push(Line::raw(" Nothing has happened yet."));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn help(frame: &mut Frame, area: Rect) {
    let width = usize::from(area.width).saturating_sub(KEYS + 1).max(8);
    let mut lines = Vec::new();
    for (keys, what) in HELP {
        for (at, part) in wrap(what, width).into_iter().enumerate() {
            lines.push(Line::raw(format!(" {:<KEYS$}{part}", if at == 0 { keys } else { "" })));
        }
    }
    frame.render_widget(Paragraph::new(lines), area);
}

/// The bar with as many keys as fit.
fn key_bar(top: &Top, width: u16) -> Line<'static> {
    if top.typing {
        return Line::raw(format!("Show only: {}▏  (Enter: keep, Esc: all)", printable(top.filter.as_bytes())));
    }
    let mut spans = Vec::new();
    if !top.filter.is_empty() {
        spans.push(Span::raw(format!("only: {} ", shorten(&printable(top.filter.as_bytes()), 20))));
    }
    let rows = if top.rows_are == Rows::Process { "Workloads" } else { "Processes" };
    let view = if top.view == View::Programs { "Memory" } else { "Programs" };
    for (key, what) in [
        ("F1", "Help"),
        ("F10", "Quit"),
        ("F2", view),
        ("F3", "History"),
        ("F4", "Filter"),
        ("F5", rows),
        ("F6", "Sort"),
        ("F7", "Events"),
        ("Enter", "Why"),
    ] {
        if top.view != View::Programs && ["F4", "F5", "F6", "Enter"].contains(&key) {
            continue;
        }
        let used: usize = spans.iter().map(Span::width).sum();
        if used + key.len() + what.len() > width.into() {
            break;
        }
        spans.push(Span::raw(key));
        spans.push(Span::styled(what, Look::chosen()));
        spans.push(Span::raw(" "));
    }
    Line::from(spans)
}
