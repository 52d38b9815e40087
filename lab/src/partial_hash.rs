//! UKSM's hashes of part of a page (section 6.2), and the controller that chooses how much is hashed (section 6.1).
//!
//! They are used by the simulated UKSM scanner and by `pagefold-lab bench hash`. The live engine has a hash of the kernel and
//! rules of its own, which change the strength more rarely ([`pagefold_engine::strength`]).

mod progressive;
mod strength;

pub use progressive::{LineHash, PartialHash, WordHash};
pub use strength::{RoundCost, StrengthController};
