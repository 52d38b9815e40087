//! Guesses which name somebody meant.

use std::cmp::min;

/// The shortest word that we take for the beginning of a name.
const CUT: usize = 3;

/// The most similar of the known names, several if they're equally similar. One letter in every `letters` may be wrong,
/// missing, extra, or swapped with the next; one such mistake is always allowed. A name may also be cut short. Case and
/// hyphens at the beginning don't count.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>, letters: usize) -> Vec<&'a str> {
    let plain = |name: &str| name.trim_start_matches('-').to_lowercase();
    let word = plain(word);
    let length = word.chars().count();
    let mut least = usize::MAX;
    let mut nearest = Vec::new();
    for name in known {
        let plain = plain(name);
        let most = min(length, plain.chars().count()) / letters;
        let mut edits = strsim::damerau_levenshtein(&word, &plain);
        if edits > 1 && length >= CUT && plain.starts_with(&word) {
            edits = 1;
        }
        if edits > most.max(1) || edits > least || length < 2 {
            continue;
        }
        if edits < least {
            nearest.clear();
            least = edits;
        }
        nearest.push(name);
    }
    nearest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_similar_name_is_meant() {
        let known = ["scan", "top", "status", "include", "exclude", "--pid", "--pod", "--json", "redis-server"];
        for (word, meant) in [
            ("sacn", &["scan"][..]),
            ("SCAN", &["scan"]),
            ("tpo", &["top"]),
            ("stat", &["status"]),
            ("inlcude", &["include"]),
            ("--jason", &["--json"]),
            ("--ptd", &["--pid", "--pod"]),
            ("redsi-sevrer", &["redis-server"]),
            ("inscan", &[]),
            ("clude", &[]),
            ("st", &[]),
            ("nginx", &[]),
        ] {
            assert_eq!(nearest(word, known, 3), meant, "{word}");
        }
    }
}
