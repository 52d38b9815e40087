//! Apache DataFusion over the files that count.

use crate::inventory::{Inventory, LeftOut};
use crate::sources::Source;
use crate::table::{Lost, table};
use crate::{functions, queries};
use datafusion::arrow::array::{Float64Array, Int64Array, RecordBatch, StringArray};
use datafusion::common::cast::{as_float64_array, as_int64_array, as_string_array};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::context::{SessionConfig, SessionContext};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use std::sync::Arc;

/// How many rows are processed together. A sketch has 32 KiB.
pub const BATCH_ROWS: usize = 128;

/// A session with the tables that the queries use.
pub struct Engine {
    session: SessionContext,
    workloads: usize,
    lost: Lost,
}

impl Engine {
    /// Opens the files that count. Queries use at most `memory` bytes for their tables, and write the rest to temporary
    /// files.
    pub async fn open(sources: &[Source], inventory: &Inventory, memory: usize) -> Result<Self> {
        let config = SessionConfig::new().with_batch_size(BATCH_ROWS);
        let runtime = RuntimeEnvBuilder::new().with_memory_limit(memory, 1.0).build_arc()?;
        let session = SessionContext::new_with_config_rt(config, runtime);
        functions::register(&session);
        let lost = Lost::default();
        session.register_table("sketches", Arc::new(table(sources, inventory, &lost)?))?;
        let workloads = inventory.workloads();
        for (name, sql) in [
            ("workloads", queries::WORKLOADS),
            ("held", queries::HELD),
            ("contents", &queries::contents(queries::sampled(workloads))),
        ] {
            let view = session.sql(sql).await?.into_view();
            session.register_table(name, view)?;
        }
        Ok(Self { session, workloads, lost })
    }

    pub fn workloads(&self) -> usize {
        self.workloads
    }

    /// Files that counted, but that we couldn't read when a query needed them.
    pub fn lost(&self) -> Vec<LeftOut> {
        self.lost.files()
    }

    pub async fn rows(&self, sql: &str) -> Result<Vec<RecordBatch>> {
        self.session.sql(sql).await?.collect().await
    }

    pub async fn stream(&self, sql: &str) -> Result<SendableRecordBatchStream> {
        self.session.sql(sql).await?.execute_stream().await
    }
}

/// The columns of a batch, by name.
pub struct Columns<'a>(pub &'a RecordBatch);

impl<'a> Columns<'a> {
    pub fn named(&self, name: &str) -> Result<&'a Arc<dyn datafusion::arrow::array::Array>> {
        let missing = || DataFusionError::Internal(format!("the result has no column {name}"));
        self.0.column_by_name(name).ok_or_else(missing)
    }

    pub fn texts(&self, name: &str) -> Result<&'a StringArray> {
        as_string_array(self.named(name)?)
    }

    pub fn integers(&self, name: &str) -> Result<&'a Int64Array> {
        as_int64_array(self.named(name)?)
    }

    pub fn numbers(&self, name: &str) -> Result<&'a Float64Array> {
        as_float64_array(self.named(name)?)
    }
}

/// A number of a column, or 0 if it's negative.
pub fn positive(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
