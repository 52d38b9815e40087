//! Apache DataFusion over the files that count.

use crate::inventory::Inventory;
use crate::sources::Source;
use crate::{functions, queries};
use datafusion::arrow::array::{Float64Array, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use datafusion::common::cast::{as_float64_array, as_int64_array, as_string_array};
use datafusion::datasource::file_format::parquet::ParquetFormat;
use datafusion::datasource::listing::{ListingOptions, ListingTable, ListingTableConfig, ListingTableUrl};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SendableRecordBatchStream;
use datafusion::execution::context::{SessionConfig, SessionContext};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use std::sync::Arc;

/// Rows that are processed together: a sketch has 32 KiB.
const BATCH_ROWS: usize = 128;

/// Columns of text, and of numbers, in a file of sketches. Those whose names end in `_us` are times.
const TEXTS: [&str; 5] = ["host", "key", "kind", "workload", "domain"];
const NUMBERS: [&str; 19] = [
    "time_us",
    "since_us",
    "anonymous_bytes",
    "read_bytes",
    "zero_bytes",
    "pages_1",
    "pages_2",
    "pages_3_15",
    "pages_16_255",
    "pages_256",
    "savable_bytes",
    "saved_bytes",
    "take_back_bytes",
    "came_bytes",
    "went_bytes",
    "broken_bytes",
    "cpu_millicores",
    "host_memory_bytes",
    "host_cpu_millicores",
];

/// A session with the tables that the queries are about.
pub struct Engine {
    session: SessionContext,
    workloads: usize,
}

impl Engine {
    /// Opens the files that count. Queries take at most `memory` bytes for tables, and write the rest to temporary files.
    pub async fn open(sources: &[Source], inventory: &Inventory, memory: usize) -> Result<Self> {
        let mut config = SessionConfig::new().with_batch_size(BATCH_ROWS).with_collect_statistics(false);
        // A sketch is copied once, into what the theta functions read.
        config.options_mut().execution.parquet.schema_force_view_types = false;
        let runtime = RuntimeEnvBuilder::new().with_memory_limit(memory, 1.0).build_arc()?;
        let session = SessionContext::new_with_config_rt(config, runtime);
        for source in sources {
            session.register_object_store(&source.root, source.store.clone());
        }
        functions::register(&session);
        let files = inventory.chosen.iter().map(|(file, _)| ListingTableUrl::parse(file.as_str()));
        let options = ListingOptions::new(Arc::new(ParquetFormat::default()));
        let table = ListingTableConfig::new_with_multi_paths(files.collect::<Result<_>>()?)
            .with_listing_options(options)
            .with_schema(Arc::new(schema()));
        session.register_table("sketches", Arc::new(ListingTable::try_new(table)?))?;
        let workloads = inventory.workloads();
        for (name, sql) in [
            ("workloads", queries::WORKLOADS),
            ("held", queries::HELD),
            ("contents", &queries::contents(queries::sampled(workloads))),
        ] {
            let view = session.sql(sql).await?.into_view();
            session.register_table(name, view)?;
        }
        Ok(Self { session, workloads })
    }

    /// The number of workloads.
    pub fn workloads(&self) -> usize {
        self.workloads
    }

    pub async fn rows(&self, sql: &str) -> Result<Vec<RecordBatch>> {
        self.session.sql(sql).await?.collect().await
    }

    pub async fn stream(&self, sql: &str) -> Result<SendableRecordBatchStream> {
        self.session.sql(sql).await?.execute_stream().await
    }
}

fn schema() -> Schema {
    let text = |name: &&str| Field::new(*name, DataType::Utf8, false);
    let number = |name: &&str| {
        let time = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
        Field::new(*name, if name.ends_with("_us") { time } else { DataType::Int64 }, false)
    };
    let sketch = Field::new("sketch", DataType::Binary, false);
    Schema::new(TEXTS.iter().map(text).chain(NUMBERS.iter().map(number)).chain([sketch]).collect::<Vec<_>>())
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

/// A number of a column as one that is not negative.
pub fn positive(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
