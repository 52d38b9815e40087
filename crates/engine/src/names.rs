//! Settings with names.

/// Implements [`Display`](std::fmt::Display) and [`FromStr`](std::str::FromStr) for an enum with a table `NAMES` of its
/// names and values. `$unknown` makes an error of any other name.
macro_rules! named {
    ($type:ty, $unknown:path) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let name = Self::NAMES.iter().find(|(_, value)| value == self).map_or("", |(name, _)| name);
                f.write_str(name)
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::error::ConfigError;
            fn from_str(name: &str) -> Result<Self, Self::Err> {
                let found = Self::NAMES.iter().find(|(known, _)| *known == name);
                found.map(|&(_, value)| value).ok_or_else(|| $unknown(name.to_owned()))
            }
        }
    };
}
pub(crate) use named;
