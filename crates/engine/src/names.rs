//! Settings that users choose by name.

/// Implements [`Display`](std::fmt::Display) and [`FromStr`](std::str::FromStr) for an enum with a table `NAMES` of its
/// names and values. Errors call such a setting a `$noun`.
#[macro_export]
macro_rules! named {
    ($type:ty, $noun:literal) => {
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
                found.map(|&(_, value)| value).ok_or_else(|| {
                    let known = Self::NAMES.map(|(known, _)| known).to_vec();
                    $crate::error::ConfigError::NoName { noun: $noun, name: name.to_owned(), known }
                })
            }
        }
    };
}
