//! Whether this machine is fit: facts about it, and what they mean for pagefold.

pub mod diagnose;
pub mod facts;
