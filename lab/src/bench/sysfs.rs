//! A sysfs file that we change for a while.

use anyhow::Context;
use pagefold_procmem::os::fields::chosen;
use std::fs;
use std::path::{Path, PathBuf};

/// A changed file. Dropping this restores it.
#[must_use]
#[derive(Debug)]
pub struct Changed {
    path: PathBuf,
    before: String,
}

impl Changed {
    /// Writes a value. In a file with choices, such as `full [medium] low`, we restore the selected one.
    pub fn to(path: PathBuf, value: &str) -> anyhow::Result<Self> {
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let before = chosen(&text).unwrap_or(text.trim()).to_owned();
        write(&path, value)?;
        Ok(Self { path, before })
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        if let Err(error) = write(&self.path, &self.before) {
            eprintln!("cannot restore {}: {error:#}", self.before);
        }
    }
}

fn write(path: &Path, value: &str) -> anyhow::Result<()> {
    fs::write(path, value).with_context(|| format!("cannot write {value} to {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_choices_are_restored() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name| dir.path().join(name);
        let text = |name| fs::read_to_string(path(name)).unwrap();
        fs::write(path("number"), "70\n").unwrap();
        fs::write(path("choice"), "full [medium] low quiet \n").unwrap();
        {
            let _number = Changed::to(path("number"), "100").unwrap();
            let _choice = Changed::to(path("choice"), "low").unwrap();
            assert_eq!((text("number").as_str(), text("choice").as_str()), ("100", "low"));
        }
        assert_eq!((text("number").as_str(), text("choice").as_str()), ("70", "medium"));
        assert!(Changed::to(path("none"), "1").is_err());
        assert!(!path("none").exists());
    }
}
