//! If a value isn't a sketch, the result is null. The table has no such values, because we check files when we read
//! them.

use datafusion::arrow::array::{
    Array, ArrayRef, BinaryArray, BinaryBuilder, Int64Array, Int64Builder, ListBuilder, StringArray,
};
use datafusion::arrow::datatypes::{DataType, Field};
use datafusion::common::cast::{as_binary_array, as_int64_array, as_string_array};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::context::SessionContext;
use datafusion::logical_expr::{Accumulator, ColumnarValue, Volatility, create_udaf, create_udf};
use datafusion::scalar::ScalarValue;
use datasketches::theta::{CompactThetaSketch, ThetaIntersection, ThetaUnion, ThetaUnionBuilder};
use pagefold_engine::units::whole;
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// The sizes that Spark permits, as logarithms.
const LG_SIZES: std::ops::RangeInclusive<i64> = 4..=26;
/// The longest sketch that these functions make: 2^12 contents and a preamble. A longer one comes from elsewhere.
const SKETCH_BYTES: usize = (8 << 12) + 24;

/// A function: its name, the types of its arguments, the type of its result, and its code.
type Scalar = (&'static str, Vec<DataType>, DataType, fn(&[ArrayRef]) -> Result<ArrayRef>);

/// Makes the functions known to a session.
pub fn register(session: &SessionContext) {
    use DataType::{Binary, Int64, Utf8};
    let hashes = DataType::List(Arc::new(Field::new_list_field(Int64, true)));
    let scalars: [Scalar; 6] = [
        ("length", vec![Binary], Int64, length),
        ("sha2", vec![Utf8, Int64], Utf8, sha2),
        ("theta_sketch_estimate", vec![Binary], Int64, estimate),
        ("theta_union", vec![Binary, Binary, Int64], Binary, union),
        ("theta_intersection", vec![Binary, Binary], Binary, intersection),
        ("theta_lowest", vec![Binary, Int64], hashes, lowest),
    ];
    for (name, arguments, result, function) in scalars {
        let call = move |arguments: &[ColumnarValue]| {
            let arrays = ColumnarValue::values_to_arrays(arguments)?;
            function(&arrays).map(ColumnarValue::Array)
        };
        session.register_udf(create_udf(name, arguments, result, Volatility::Immutable, Arc::new(call)));
    }
    session.register_udaf(create_udaf(
        "theta_union_agg",
        vec![Binary, Int64],
        Arc::new(Binary),
        Volatility::Immutable,
        Arc::new(|_| Ok(Box::new(Union::default()) as Box<dyn Accumulator>)),
        // The state of the aggregation: the union so far, and its size.
        Arc::new(vec![Binary, Int64]),
    ));
}

fn sketch(bytes: &[u8]) -> Option<CompactThetaSketch> {
    if bytes.len() <= SKETCH_BYTES { CompactThetaSketch::deserialize(bytes).ok() } else { None }
}

fn sketch_at(array: &BinaryArray, row: usize) -> Option<CompactThetaSketch> {
    if array.is_valid(row) { sketch(array.value(row)) } else { None }
}

fn size_at(array: &Int64Array, row: usize) -> Result<u8> {
    let lg = if array.is_valid(row) { array.value(row) } else { -1 };
    match u8::try_from(lg) {
        Ok(size) if LG_SIZES.contains(&lg) => Ok(size),
        _ => Err(DataFusionError::Execution(format!("the size of a sketch is 2^4 to 2^26, not 2^{lg}"))),
    }
}

fn new_union(lg: u8) -> Result<ThetaUnion> {
    ThetaUnionBuilder::default().lg_k(lg).build().map_err(|error| DataFusionError::Execution(error.to_string()))
}

fn length(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let array = as_binary_array(&arguments[0])?;
    let lengths = array.iter().map(|bytes| i64::try_from(bytes?.len()).ok());
    Ok(Arc::new(lengths.collect::<Int64Array>()))
}

/// SHA-2 of 256 bits as hexadecimal digits. The queries ask for no other length.
fn sha2(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let (texts, bits) = (as_string_array(&arguments[0])?, as_int64_array(&arguments[1])?);
    let digests = texts.iter().zip(bits).map(|(text, bits)| match bits {
        Some(256) => Some(format!("{:x}", Sha256::digest(text?))),
        _ => None,
    });
    Ok(Arc::new(digests.collect::<StringArray>()))
}

/// Rounds a sketch's estimate to a whole number, as Spark does.
fn estimate(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let array = as_binary_array(&arguments[0])?;
    let estimates = array.iter().map(|bytes| {
        let estimate = whole(sketch(bytes?)?.estimate().round());
        Some(i64::try_from(estimate).unwrap_or(i64::MAX))
    });
    Ok(Arc::new(estimates.collect::<Int64Array>()))
}

fn union(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let (a, b) = (as_binary_array(&arguments[0])?, as_binary_array(&arguments[1])?);
    let sizes = as_int64_array(&arguments[2])?;
    let mut unions = BinaryBuilder::new();
    for row in 0..a.len() {
        let union = new_union(size_at(sizes, row)?)?;
        unions.append_option(united(union, sketch_at(a, row), sketch_at(b, row)));
    }
    Ok(Arc::new(unions.finish()))
}

fn united(mut union: ThetaUnion, a: Option<CompactThetaSketch>, b: Option<CompactThetaSketch>) -> Option<Vec<u8>> {
    union.update(&a?).ok()?;
    union.update(&b?).ok()?;
    Some(union.to_sketch(true).serialize())
}

fn intersection(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let (a, b) = (as_binary_array(&arguments[0])?, as_binary_array(&arguments[1])?);
    let mut intersections = BinaryBuilder::new();
    for row in 0..a.len() {
        intersections.append_option(common(sketch_at(a, row), sketch_at(b, row)));
    }
    Ok(Arc::new(intersections.finish()))
}

fn common(a: Option<CompactThetaSketch>, b: Option<CompactThetaSketch>) -> Option<Vec<u8>> {
    let mut both = ThetaIntersection::default();
    both.update(&a?).ok()?;
    both.update(&b?).ok()?;
    Some(both.to_sketch(true)?.serialize())
}

/// The lowest hashes of a sketch. Spark has no such function: its job cuts them out of the serialized form.
fn lowest(arguments: &[ArrayRef]) -> Result<ArrayRef> {
    let (array, numbers) = (as_binary_array(&arguments[0])?, as_int64_array(&arguments[1])?);
    let mut lists = ListBuilder::new(Int64Builder::new());
    for row in 0..array.len() {
        let most = usize::try_from(numbers.value(row)).unwrap_or(0);
        if let Some(sketch) = sketch_at(array, row) {
            let mut hashes: Vec<i64> = sketch.iter().map(|entry| entry.hash().cast_signed()).collect();
            hashes.sort_unstable();
            hashes.truncate(most);
            lists.values().append_slice(&hashes);
        }
        lists.append(true);
    }
    Ok(Arc::new(lists.finish()))
}

/// The union of a group's sketches.
#[derive(Debug, Default)]
struct Union {
    union: Option<(u8, ThetaUnion)>,
}

impl Union {
    fn bytes(&self) -> Option<Vec<u8>> {
        let (_, union) = self.union.as_ref()?;
        Some(union.to_sketch(true).serialize())
    }
}

impl Accumulator for Union {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        let (sketches, sizes) = (as_binary_array(&values[0])?, as_int64_array(&values[1])?);
        for row in 0..sketches.len() {
            let Some(sketch) = sketch_at(sketches, row) else { continue };
            let (_, union) = match &mut self.union {
                Some(union) => union,
                none => {
                    let lg = size_at(sizes, row)?;
                    none.insert((lg, new_union(lg)?))
                }
            };
            union.update(&sketch).map_err(|error| DataFusionError::Execution(error.to_string()))?;
        }
        Ok(())
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        self.update_batch(states)
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let lg = self.union.as_ref().map(|(lg, _)| i64::from(*lg));
        Ok(vec![ScalarValue::Binary(self.bytes()), ScalarValue::Int64(lg)])
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        Ok(ScalarValue::Binary(self.bytes()))
    }

    fn size(&self) -> usize {
        size_of_val(self) + self.union.as_ref().map_or(0, |(_, union)| union.estimated_size())
    }
}
