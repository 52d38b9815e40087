//! The names of policies, and their colours.

/// We compare all others with this policy.
pub const SUBJECT: &str = "pagefold";

/// KSM as commonly configured.
pub const KSM: &str = "ksm-1000/20ms";
/// KSM without a pause.
pub const KSM_EVERYTHING: &str = "ksm-everything";
/// The policy that knows the duplicates beforehand, as an upper bound.
pub const ORACLE: &str = "oracle";
/// The policy that does nothing.
pub const NO_MERGING: &str = "no merging";

/// The peers' colours, safe for colour blindness (after Okabe and Ito).
pub const PEERS: [&str; 5] = ["#0072b2", "#009e73", "#7a7a7a", "#cc79a7", "#56b4e9"];
/// pagefold's colours, for several options in one experiment.
const OURS: [&str; 4] = ["#d55e00", "#e69f00", "#8c3a00", "#b8860b"];

/// Whether a policy is pagefold, with any options.
pub fn is_ours(name: &str) -> bool {
    name.strip_prefix(SUBJECT).is_some_and(|rest| !rest.starts_with(|first: char| first.is_alphanumeric()))
}

/// Each policy's colour in a picture.
pub fn colours<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'static str> {
    let mut ours = OURS.into_iter().cycle();
    let mut peers = PEERS.into_iter().cycle();
    names.filter_map(|name| if is_ours(name) { ours.next() } else { peers.next() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_told_from_peers_by_their_names() {
        let names = ["pagefold --quick", "pagefolder", "pagefold", "ksm"];
        assert_eq!(names.map(is_ours), [true, false, true, false]);
        assert_eq!(colours(names.into_iter()), [OURS[0], PEERS[0], OURS[1], PEERS[1]]);
    }
}
