//! UKSM's hashes of part of a page (section 6.2), and the controller that chooses how much to hash (section 6.1).
//!
//! The simulated UKSM scanner and `pagefold-lab bench hash` use them. The live engine has one of the kernel's hashes
//! and its own rules, which change the strength more rarely ([`pagefold_engine::strength`]).

mod progressive;
mod strength;

pub use progressive::{LineHash, PartialHash, WordHash};
pub use strength::{RoundCost, StrengthController};
