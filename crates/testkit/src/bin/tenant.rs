//! A tenant without an activity: `tenant tenant --spec JSON`.

fn main() {
    let spec = std::env::args().nth(3).expect("tenant --spec JSON");
    pagefold_workload::serve(&spec)
}
