//! The lab: one recorded or generated memory, every algorithm on it, the same counters.
//!
//! A [`record`] says what pages held, snapshot by snapshot; it is taken from running programs or made by a generator.
#![forbid(unsafe_code)]

pub mod digests;
pub mod generate;
pub mod live;
pub mod plots;
pub mod record;
pub mod replay;
pub mod scale;
pub mod script;
pub mod table;
