//! The description of a tenant.

use pagefold_engine::units::Pages;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The memory of a tenant and its activity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// The segments of its memory, each a mapping of its own.
    pub segments: Vec<Segment>,
    /// What the tenant does after [`Tenant::begin`](super::Tenant::begin), as JSON of an
    /// [`Activity`](crate::activity::Activity).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activity: Option<Value>,
    /// Whether the tenant asks for huge pages in all segments (`MADV_HUGEPAGE`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub huge: bool,
}

impl TenantSpec {
    /// A tenant that holds these segments and does nothing.
    pub fn new(segments: impl IntoIterator<Item = Segment>) -> Self {
        Self { segments: segments.into_iter().collect(), ..Self::default() }
    }

    #[must_use]
    pub fn with_huge_pages(self) -> Self {
        Self { huge: true, ..self }
    }

    pub fn pages(&self) -> Pages {
        self.segments.iter().map(|segment| segment.pages()).sum()
    }
}

/// Memory filled in one way. Equal kinds with equal seeds have equal contents in all tenants, except for `Random`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Segment {
    /// Every page has the same content.
    Same { pages: u64, seed: u64 },
    /// Contents that are found nowhere else, because the tenant's pid is part of the seed.
    Random { pages: u64, seed: u64 },
    /// Zeros that we write, so that each page has a frame of its own.
    Zero { pages: u64 },
    /// Contents that differ within the segment and are the same in every tenant.
    Shared { pages: u64, seed: u64 },
    /// The contents of `Shared`, in another order.
    Permuted { pages: u64, seed: u64 },
    /// `percent` of a hundred pages have one content and are spread evenly; the others are like `Random`.
    Thin { pages: u64, seed: u64, percent: u64 },
    /// Every content is there twice, half the segment apart.
    Pairs { pages: u64, seed: u64 },
    /// Pages that differ only in their last eight bytes, which hold the page's number: the worst case for a comparison.
    Tails { pages: u64, seed: u64 },
}

impl Segment {
    pub const fn pages(self) -> Pages {
        match self {
            Self::Same { pages, .. }
            | Self::Random { pages, .. }
            | Self::Zero { pages }
            | Self::Shared { pages, .. }
            | Self::Permuted { pages, .. }
            | Self::Thin { pages, .. }
            | Self::Pairs { pages, .. }
            | Self::Tails { pages, .. } => Pages(pages),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_round_trips_through_json() {
        let spec = TenantSpec::new([
            Segment::Same { pages: 3, seed: 1 },
            Segment::Random { pages: 4, seed: u64::MAX },
            Segment::Zero { pages: 5 },
            Segment::Shared { pages: 6, seed: 2 },
            Segment::Pairs { pages: 7, seed: 3 },
            Segment::Tails { pages: 8, seed: 4 },
            Segment::Permuted { pages: 9, seed: 2 },
            Segment::Thin { pages: 10, seed: 5, percent: 8 },
        ]);
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<TenantSpec>(&json).unwrap(), spec);
        assert!(!json.contains("activity") && !json.contains("huge"));
        let huge = spec.clone().with_huge_pages();
        assert_eq!(serde_json::from_str::<TenantSpec>(&serde_json::to_string(&huge).unwrap()).unwrap(), huge);
        assert_eq!(spec.pages(), Pages(52));
    }

    #[test]
    fn unknown_fields_and_kinds_are_rejected() {
        for text in [
            r#"{"segments":[{"same":{"pages":1}}]}"#,
            r#"{"segments":[{"sane":{"pages":1,"seed":2}}]}"#,
            r#"{"segments":[{"zero":{"pages":1,"seed":2}}]}"#,
            r#"{"segments":[],"more":1}"#,
            r#"{"segments":[{"zero":{"pages":-1}}]}"#,
        ] {
            assert!(serde_json::from_str::<TenantSpec>(text).is_err(), "{text}");
        }
    }
}
