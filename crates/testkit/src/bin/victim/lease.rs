//! Mode `lease DIR`: takes KSM over as pagefold does, with lock and state file in DIR, and prints `taken`. For tests
//! that kill it.

use pagefold_engine::host::ScanOrder;
use pagefold_ksm::controller::KsmdController;
use pagefold_ksm::ksmd::Ksmd;
use pagefold_ksm::lease::{INITIAL_KNOBS, KsmLease, KsmPaths};
use pagefold_ksm::{KSM_ROOT, Ksm};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub fn main(dir: &Path) {
    let paths = KsmPaths::in_dir(dir);
    let ksm = Arc::new(Ksm::open(Path::new(KSM_ROOT)).expect("KSM"));
    let lease = KsmLease::take(ksm, &paths, &INITIAL_KNOBS).expect("a lease");
    let controller = KsmdController::start(&lease, Ksmd::find().expect("ksmd")).expect("a controller");
    controller.order(ScanOrder::Pace { pages_to_scan: 10, sleep_ms: 30, thorough: false });
    assert!(controller.wait_idle(Duration::from_secs(60)));
    println!("taken");
    let _ = std::io::stdin().lines().count();
}
