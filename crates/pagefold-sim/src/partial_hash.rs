//! UKSM's hashes of part of a page (section 6.2), and the controller that chooses how much is hashed (section 6.1).
//!
//! The live engine always hashes whole pages. These are used by the simulated UKSM scanner and by `pagefold-lab bench
//! hash`.

mod progressive;
mod strength;

pub use progressive::{LineHash, PartialHash, WordHash};
pub use strength::{RoundCost, StrengthController};
