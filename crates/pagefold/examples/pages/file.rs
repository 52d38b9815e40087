//! The manual page pagefold.toml(5).

use crate::writer::{SOURCE, see_also};
use clap_mangen::roff::{Roff, bold, italic, roman};
use pagefold_cli::options::{Kind, OPTIONS, OptionSpec, SECTIONS};

const DESCRIPTION: [&str; 4] = [
    "The configuration file of pagefold run. It is a TOML file; every section and key may be missing. The file as it is \
     installed sets nothing, so that nothing is in scope.",
    "pagefold run reads the file named by --config, or /etc/pagefold/pagefold.toml if it is started without a scope. After \
     it, the files in the directory pagefold.toml.d beside it whose names end in .toml are read, in the order of their \
     names. If several files have a key, the last one counts; lists are replaced as a whole. Flags on the command line \
     override all files.",
    "The files and the directories that they are in must belong to root, and no other user may be able to write them. \
     pagefold config check checks the files, pagefold config show prints what is set and where.",
    "Percentages are numbers or strings (10, 0.5, \"20%\"), times strings with a unit (\"100ms\", \"4s\").",
];

pub fn page() -> Roff {
    let mut roff = Roff::new();
    roff.control("TH", ["pagefold.toml", "5", "", SOURCE, "pagefold manual"]);
    roff.control("SH", ["NAME"]).text([roman("pagefold.toml - configuration file of pagefold")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([italic("/etc/pagefold/pagefold.toml"), roman(", "), italic("/etc/pagefold/pagefold.toml.d/*.toml")]);
    roff.control("SH", ["DESCRIPTION"]);
    for paragraph in DESCRIPTION {
        roff.control("PP", []).text([roman(paragraph)]);
    }
    for section in SECTIONS {
        roff.control("SH", [format!("[{}]", section.name).as_str()]).text([roman(section.help)]);
        OPTIONS.iter().filter(|option| option.section == section.name).for_each(|option| key(&mut roff, option));
    }
    see_also(&mut roff, ["pagefold", "pagefold-run", "pagefold-config"].map(|page| (page.to_owned(), "1")).into_iter());
    roff
}

fn key(roff: &mut Roff, option: &OptionSpec) {
    roff.control("TP", []).text([bold(option.key), roman(format!(" ({})", option.values()))]);
    let default = Some(option.default()).filter(|default| !default.is_empty());
    let default = default.map(|default| format!(" Default: {default}.")).unwrap_or_default();
    let flag = if option.flag.is_empty() { String::new() } else { format!(" Flag: --{}.", option.flag) };
    roff.text([roman(format!("{}.{default}{flag}", option.help))]);
    if !default.is_empty() {
        return;
    }
    roff.control("RS", []).control("PP", []).text([roman("Example:")]).control("PP", []).control("nf", []);
    let (section, key) = (option.section, option.key);
    let example = match option.kind {
        Kind::Rules(_) => option.example.replace("name = ", &format!("[[{section}.{key}]]\nname = ")),
        Kind::Names(_) => format!("[{section}.{key}]\n{}", option.example),
        _ => format!("{key} = {}", option.example),
    };
    for line in example.lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []).control("RE", []);
}
