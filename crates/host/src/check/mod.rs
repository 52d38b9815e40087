//! Whether pagefold can run on this machine: facts about it, and the findings of `pagefold doctor`.

pub mod diagnose;
pub mod facts;
pub mod users;
