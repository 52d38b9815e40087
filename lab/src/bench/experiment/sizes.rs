//! An experiment's sizes and times as a table: a name, the value, that of a quick run, and the parameters that report
//! it.

/// Defines `Sizes`.
macro_rules! sizes {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $full:expr, quick $quick:expr $(, as $($key:literal),+)?;)*) => {
        #[derive(Clone, Copy, Debug)]
        struct Sizes {
            $($(#[$doc])* $name: $type,)*
        }

        impl Sizes {
            /// The sizes for this setting, added to the report.
            fn of(setting: &ExperimentSetting<'_>, report: &mut ExperimentReport) -> Self {
                let full = Self { $($name: $full,)* };
                let quick = Self { $($name: $quick,)* };
                let sizes = if setting.quick { quick } else { full };
                report.parameters([$($($(($key, sizes.$name as u64),)+)?)*]);
                sizes
            }
        }
    };
}
