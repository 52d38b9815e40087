//! Each query reads and checks the files anew. We don't use DataFusion's reader of Parquet, because hosts replace their
//! files at any time. With that reader, the query fails if a file's length has changed since it began, and a hostile
//! new file is worse. Here the new file counts, or we leave it out and name it.

use crate::engine::BATCH_ROWS;
use crate::inventory::{Header, Inventory, LeftOut, Terms, name};
use crate::sources::{AT_A_TIME, Source};
use datafusion::arrow::array::{
    ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray, TimestampMicrosecondArray,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use datafusion::catalog::streaming::StreamingTable;
use datafusion::error::Result;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use futures::{StreamExt, stream};
use pagefold_sketch::Row;
use pagefold_sketch::file::{NUMBERS, TEXTS, is_time};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use url::Url;

/// The files that queries couldn't read. By name, because a query may try a file several times.
#[derive(Clone, Debug, Default)]
pub struct Lost(Arc<Mutex<BTreeMap<String, LeftOut>>>);

impl Lost {
    fn add(&self, file: &Url, host: &str, why: String) {
        let left_out = LeftOut { file: name(file), host: Some(host.to_owned()), why };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(left_out.file.clone(), left_out);
    }

    pub fn files(&self) -> Vec<LeftOut> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}

/// Makes the table. Queries add the files that they cannot read to `lost`.
pub fn table(sources: &[Source], inventory: &Inventory, lost: &Lost) -> Result<StreamingTable> {
    let schema = Arc::new(schema());
    let mut files = Vec::new();
    for (url, header) in &inventory.chosen {
        if let Some(source) = sources.iter().find(|source| source.has(url)) {
            let (source, url, host) = (source.clone(), url.clone(), header.host.clone());
            files.push(File { source, url, host, terms: inventory.terms });
        }
    }
    let mut parts: Vec<Arc<dyn PartitionStream>> = Vec::new();
    for files in files.chunks(files.len().div_ceil(AT_A_TIME).max(1)) {
        parts.push(Arc::new(Part { schema: schema.clone(), files: files.into(), lost: lost.clone() }));
    }
    StreamingTable::try_new(schema, parts)
}

#[derive(Clone, Debug)]
struct File {
    source: Source,
    url: Url,
    host: String,
    terms: Terms,
}

impl File {
    async fn rows(&self) -> Result<Vec<Row>, String> {
        let read = self.source.read(&self.url).await?;
        // This also checks that the file is still named after its host.
        match self.terms.no_longer(&self.url, &Header::of(&read)?) {
            Some(why) => Err(why),
            None => Ok(read.rows),
        }
    }
}

/// Files that one thread reads one after the other.
#[derive(Debug)]
struct Part {
    schema: SchemaRef,
    files: Arc<[File]>,
    lost: Lost,
}

impl PartitionStream for Part {
    fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        let (schema, files, lost) = (self.schema.clone(), self.files.clone(), self.lost.clone());
        let rows = stream::iter(0..files.len()).then(move |at| {
            let (files, lost) = (files.clone(), lost.clone());
            async move {
                let file = &files[at];
                match file.rows().await {
                    Ok(rows) => rows,
                    Err(why) => {
                        lost.add(&file.url, &file.host, why);
                        Vec::new()
                    }
                }
            }
        });
        let batches = rows.flat_map(move |rows| stream::iter(batches(schema.clone(), rows)));
        Box::pin(RecordBatchStreamAdapter::new(self.schema.clone(), batches))
    }
}

fn schema() -> Schema {
    let mut fields = Vec::new();
    for (name, _) in TEXTS {
        fields.push(Field::new(name, DataType::Utf8, false));
    }
    for (name, ..) in NUMBERS {
        let time = DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()));
        fields.push(Field::new(name, if is_time(name) { time } else { DataType::Int64 }, false));
    }
    fields.push(Field::new("sketch", DataType::Binary, false));
    Schema::new(fields)
}

fn batches(schema: SchemaRef, rows: Vec<Row>) -> impl Iterator<Item = Result<RecordBatch>> {
    let starts = (0..rows.len()).step_by(BATCH_ROWS);
    starts.map(move |start| batch(&schema, &rows[start..rows.len().min(start + BATCH_ROWS)]))
}

fn batch(schema: &SchemaRef, rows: &[Row]) -> Result<RecordBatch> {
    let mut columns: Vec<ArrayRef> = Vec::new();
    for (_, text) in TEXTS {
        columns.push(Arc::new(StringArray::from_iter_values(rows.iter().map(text))));
    }
    for (name, number, _) in NUMBERS {
        // Numbers in a file are never larger.
        let numbers = rows.iter().map(|row| i64::try_from(number(row)).unwrap_or(i64::MAX));
        if is_time(name) {
            let times = TimestampMicrosecondArray::from_iter_values(numbers).with_timezone("UTC");
            columns.push(Arc::new(times));
        } else {
            columns.push(Arc::new(Int64Array::from_iter_values(numbers)));
        }
    }
    columns.push(Arc::new(BinaryArray::from_iter_values(rows.iter().map(|row| row.sketch.to_bytes()))));
    Ok(RecordBatch::try_new(schema.clone(), columns)?)
}
