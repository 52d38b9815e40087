//! Runs the scenarios of `tests/numa.rs` in an emulated machine: reads them from `/scenarios.json`, and writes the
//! result of each as a line of JSON to the second serial port.

mod filler;
#[path = "../../tests/numa/model.rs"]
mod model;
mod pages;
mod programs;
mod scenario;

use model::Scenario;
use std::fs::{self, OpenOptions};
use std::io::Write;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|mode| mode == "filler") {
        filler::main(&args[2..]);
    }
    let text = fs::read_to_string("/scenarios.json").expect("the scenarios");
    let scenarios: Vec<Scenario> = serde_json::from_str(&text).expect("scenarios");
    let mut results = OpenOptions::new().write(true).open("/dev/ttyS1").expect("/dev/ttyS1");
    for scenario in scenarios {
        println!("{}: begins", scenario.name);
        let outcome = scenario::run(&scenario);
        writeln!(results, "{}", serde_json::to_string(&outcome).expect("an outcome")).expect("the results");
    }
}

fn write(path: &str, text: &str) {
    try_write(path, text).unwrap_or_else(|error| panic!("{text} to {path}: {error}"));
}

fn try_write(path: &str, text: &str) -> std::io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

fn write_if_there(path: &str, text: &str) {
    if fs::exists(path).expect(path) {
        write(path, text);
    }
}
