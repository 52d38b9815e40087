//! The table of a record's file.
//!
//! A record is one flat table in one Parquet file, snappy-compressed, for any Parquet reader. A row is an event of the
//! kind in `event`; columns that don't apply to it are null:
//!
//! | column | type | meaning | in rows of |
//! | --- | --- | --- | --- |
//! | `snapshot` | int32 | number of the snapshot, starting with 0 | all |
//! | `time_ns` | int64 | time since the record began, nanoseconds | all |
//! | `event` | text | `snapshot` begins one; `process`, `exit`, `region`, `unmap`, `page` | all |
//! | `process` | uint32 | number of the process in this record | all but `snapshot` |
//! | `pid` | int32 | its PID; null in anonymous and generated records | `process` |
//! | `name` | text | its name; null in anonymous records | `process` |
//! | `region` | uint32 | number of the region in this record | `region`, `unmap`, `page` |
//! | `kind` | text | kind of memory: `heap`, `stack`, `anonymous`... | `region` |
//! | `first_page`, `pages` | int64 | its first page (address / 4096), its length in pages | `region` |
//! | `page` | int64 | the page (address / 4096) | `page` |
//! | `state` | text | `absent`, `private`, `shared` (through fork), `merged` (by KSM), `zero` (the zero page) | `page` |
//! | `huge` | bool | mapped by a huge page | `page`, unless absent |
//! | `digest` | 16 bytes | keyed digest of the content, big-endian; 0 for a page of zeros | `page`, unless absent |
//! | `part0` to `part3` | uint32 | keyed digests of its quarters | `page`, unless absent |
//! | `frame` | uint64 | page frame: equal numbers mean the same memory; null if unknown | `page`, unless absent |
//!
//! Rows describe the changes since the previous snapshot (see [`Event`](super::Event)). Pages of a new region are
//! absent until a row says otherwise. When a region changes its bounds, pages outside them are gone and pages inside
//! stay.
//!
//! The file's key-value metadata has the record's origin (see the constants below) and a checksum over the file.

use pagefold_engine::host::PageState;
pub(super) use pagefold_sketch::seal::{KEY_SCHEMA, KEY_VERSION};
use parquet::schema::{parser::parse_message_type, types::TypePtr};
use std::sync::Arc;

/// Name and version of the schema.
pub const SCHEMA: &str = "pagefold.record/1";
/// The common prefix of all versions.
pub(super) const SCHEMA_NAME: &str = "pagefold.record/";

/// `live` or the name of a generator.
pub(super) const KEY_SOURCE: &str = "pagefold.source";
/// Time between two snapshots, nanoseconds.
pub(super) const KEY_EVERY_NS: &str = "pagefold.every_ns";
/// `true` or `false`.
pub(super) const KEY_ANONYMOUS: &str = "pagefold.anonymous";

const MESSAGE: &str = "message pagefold_record {
    required int32 snapshot;
    required int64 time_ns;
    required binary event (STRING);
    optional int32 process (INTEGER(32,false));
    optional int32 pid;
    optional binary name (STRING);
    optional int32 region (INTEGER(32,false));
    optional binary kind (STRING);
    optional int64 first_page;
    optional int64 pages;
    optional int64 page;
    optional binary state (STRING);
    optional boolean huge;
    optional fixed_len_byte_array(16) digest;
    optional int32 part0 (INTEGER(32,false));
    optional int32 part1 (INTEGER(32,false));
    optional int32 part2 (INTEGER(32,false));
    optional int32 part3 (INTEGER(32,false));
    optional int64 frame (INTEGER(64,false));
}";

pub(super) fn columns() -> parquet::errors::Result<TypePtr> {
    parse_message_type(MESSAGE).map(Arc::new)
}

/// Columns whose values mostly ascend in small steps.
pub(super) const ASCENDING: [&str; 2] = ["page", "frame"];
/// Columns whose values are nearly all different.
pub(super) const RANDOM: [&str; 5] = ["digest", "part0", "part1", "part2", "part3"];

/// Values of the column `event`.
pub(super) mod word {
    pub(in super::super) const SNAPSHOT: &str = "snapshot";
    pub(in super::super) const PROCESS: &str = "process";
    pub(in super::super) const EXIT: &str = "exit";
    pub(in super::super) const REGION: &str = "region";
    pub(in super::super) const UNMAP: &str = "unmap";
    pub(in super::super) const PAGE: &str = "page";
}

/// The name of a page state in the column `state`.
pub(super) const fn state_word(state: PageState) -> &'static str {
    match state {
        PageState::Absent => "absent",
        PageState::Private => "private",
        PageState::Shared => "shared",
        PageState::Merged => "merged",
        PageState::ZeroMapped => "zero",
    }
}

/// The page state with a name.
pub(super) fn state_of(word: &str) -> Option<PageState> {
    use PageState::{Absent, Merged, Private, Shared, ZeroMapped};
    [Private, Absent, Shared, Merged, ZeroMapped].into_iter().find(|&state| state_word(state) == word)
}
