//! The manual pages of section 5: pagefold.toml, pagefold-json and pagefold-metrics.

use crate::writer::{SOURCE, see_also};
use clap_mangen::roff::{Roff, bold, italic, roman};
use pagefold::config::options::{OptionSpec, SECTIONS};
use pagefold::config::values::Allowed;
use pagefold::metrics::families::FAMILIES;
use pagefold::reference::SCHEMAS;

const DESCRIPTION: [&str; 4] = [
    "The configuration file of pagefold run. It is a TOML file; every section and key may be missing. The file as it is \
     installed sets nothing, so that nothing is in scope.",
    "pagefold run reads the file named by --config, or /etc/pagefold/pagefold.toml if it is started without a scope; with \
     a scope it obeys only [deny] and [domains] of that file. After the file, pagefold reads the files in the directory pagefold.toml.d \
     beside it whose names end in .toml, in the order of their names. If several files have a key, the last one counts; lists are replaced as a whole. Flags on the command line \
     override all files.",
    "The files and the directories that they are in must belong to root, and no other user may be able to write them. \
     pagefold config check checks the files, pagefold config show prints what is set and where.",
    "Percentages are numbers or strings (10, 0.5, \"20%\"), times strings with a unit (\"100ms\", \"4s\").",
];

const JSON: &str = "With --json, pagefold commands print one object on standard output; its schema is named in the field schema. Sizes are in \
    bytes, times in seconds and shares from 0 to 1, unless the name has another unit. Fields may be added; the number of a schema \
    changes when a field is removed or changes its meaning. The control socket answers with the same objects.";

const METRICS: &str = "The page that pagefold run serves with --metrics, or writes with --metrics-file. Counters begin at 0 with each run. \
    The label scope is a selector as the administrator wrote it, and the label kind is its kind. A process counts for the first selector \
    that it matches, or for other. At most 20 selectors are shown. Everybody may read metrics, so they're sums: they name no process, \
    program, trust domain or address.";

/// The pages, by name.
pub fn pages() -> [(&'static str, Roff); 3] {
    [("pagefold.toml", configuration()), ("pagefold-json", json()), ("pagefold-metrics", metrics())]
}

fn begin(name: &str, about: &str) -> Roff {
    let mut roff = Roff::new();
    roff.control("TH", [name, "5", "", SOURCE, "pagefold manual"]);
    roff.control("SH", ["NAME"]).text([roman(format!("{name} - {about}"))]);
    roff
}

fn json() -> Roff {
    let mut roff = begin("pagefold-json", "JSON documents of pagefold");
    roff.control("SH", ["DESCRIPTION"]).text([roman(JSON)]);
    for schema in SCHEMAS {
        roff.control("SH", [schema.name]).text([roman(format!("{}.", schema.about))]);
        for (fields, meaning) in schema.fields {
            roff.control("TP", []).text([bold(*fields)]).text([roman(format!("{meaning}."))]);
        }
    }
    see_also(&mut roff, [("pagefold".to_owned(), "1"), ("pagefold-metrics".to_owned(), "5")].into_iter());
    roff
}

fn metrics() -> Roff {
    let mut roff = begin("pagefold-metrics", "metrics of pagefold for Prometheus");
    roff.control("SH", ["DESCRIPTION"]).text([roman(METRICS)]);
    roff.control("SH", ["METRICS"]);
    for metric in FAMILIES {
        let labels =
            if metric.labels.is_empty() { String::new() } else { format!(", by {}", metric.labels.join(", ")) };
        roff.control("TP", []).text([bold(metric.name), roman(format!(" ({}{labels})", metric.kind.name()))]);
        roff.text([roman(format!("{}.", metric.help))]);
    }
    see_also(&mut roff, [("pagefold-run".to_owned(), "8"), ("pagefold-json".to_owned(), "5")].into_iter());
    roff
}

fn configuration() -> Roff {
    let mut roff = begin("pagefold.toml", "configuration file of pagefold");
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([italic("/etc/pagefold/pagefold.toml"), roman(", "), italic("/etc/pagefold/pagefold.toml.d/*.toml")]);
    roff.control("SH", ["DESCRIPTION"]);
    for paragraph in DESCRIPTION {
        roff.control("PP", []).text([roman(paragraph)]);
    }
    for section in SECTIONS {
        roff.control("SH", [format!("[{}]", section.name).as_str()]).text([roman(section.about)]);
        section.options.iter().for_each(|option| key(&mut roff, option));
    }
    let related = [("pagefold", "1"), ("pagefold-run", "8"), ("pagefold-config", "1")];
    see_also(&mut roff, related.map(|(page, section)| (page.to_owned(), section)).into_iter());
    roff
}

fn key(roff: &mut Roff, option: &OptionSpec) {
    let name = option.value_name().unwrap_or("true or false");
    let kind = match option.allowed {
        Allowed::List | Allowed::Programs => format!("list of {name}"),
        _ => option.allowed.range().map_or_else(|| name.to_owned(), |range| format!("{name}, {range}")),
    };
    roff.control("TP", []).text([bold(option.key), roman(format!(" ({kind})"))]);
    let flag = match option.flag() {
        Some(flag) if !option.is_hidden() => format!(" Flag: --{flag}."),
        _ => String::new(),
    };
    if let Some(default) = option.default() {
        roff.text([roman(format!("{}. Default: {default}.{flag}", option.help))]);
        return;
    }
    roff.text([roman(format!("{}.{flag}", option.help))]);
    roff.control("RS", []).control("PP", []).text([roman("Example:")]).control("PP", []).control("nf", []);
    for line in option.in_file().lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []).control("RE", []);
}
