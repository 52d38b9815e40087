//! `pagefold run`.

use super::{Marks, Policy, SUBJECT, Stage};
use std::time::Duration;

/// `pagefold run` with some options.
#[derive(Clone, Debug)]
pub struct Pagefold {
    seconds: u64,
    options: Vec<String>,
    enough: Option<Enough>,
}

/// The savings and time after which we may end a daemon early: it must reach both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enough {
    pub saved_bytes: u64,
    pub seconds: u64,
}

impl Pagefold {
    /// Runs pagefold with its defaults, for at most `seconds`.
    pub fn new(seconds: u64) -> Self {
        Self { seconds, options: Vec::new(), enough: None }
    }

    /// Adds these options.
    #[must_use]
    pub fn with(mut self, options: &[&str]) -> Self {
        self.options = options.iter().map(|&option| option.to_owned()).collect();
        self
    }

    /// Ends early once enough is saved.
    #[must_use]
    pub fn until(mut self, enough: Enough) -> Self {
        self.enough = Some(enough);
        self
    }
}

impl Policy for Pagefold {
    fn name(&self) -> String {
        [&[SUBJECT.to_owned()], &self.options[..]].concat().join(" ")
    }

    fn marks(&self) -> Marks {
        Marks::None
    }

    fn drive(&self, stage: &mut Stage<'_>) -> anyhow::Result<()> {
        stage.start_pagefold(&self.options)?;
        let interrupt = stage.setting.interrupt;
        interrupt.wait(Duration::from_secs(self.seconds), || {
            let (now, mut is_done) = stage.pagefold_so_far()?;
            if let Some(enough) = self.enough {
                is_done |= now.saved_bytes >= enough.saved_bytes && now.seconds >= enough.seconds as f64;
            }
            anyhow::Ok(if is_done { Some(()) } else { None })
        })?;
        Ok(())
    }
}
