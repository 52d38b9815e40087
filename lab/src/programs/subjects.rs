//! Groups of real programs to record, and the work they do meanwhile.

use super::{
    GuestWork, JavaProgram, JavaTools, MariaDbData, PythonData, PythonTools, RedisData, Target, WorkingGuest,
    WorkingGuests, scratch,
};
use anyhow::{Context, ensure};
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// Processes of each server.
const INSTANCES: usize = 3;
const GUESTS: usize = 4;
const GUEST_MIB: u64 = 192;
const REDIS_KEYS: u64 = 40_000;
const MARIADB_ROWS: u64 = 40_000;
const PYTHON_ROWS: u64 = 100_000;
const PYTHON_OWN_MIB: u64 = 16;
const JAVA_HEAP_MIB: u64 = 128;
/// Time between two changes of a database.
const CHANGE_EVERY: Duration = Duration::from_secs(5);
/// Idle time of guests between boot and work.
const REST: Duration = Duration::from_secs(10);

/// Running programs of one kind.
pub trait Subjects: Send {
    fn pids(&self) -> Vec<i32>;

    /// Does the work that's due at `elapsed` after the start of the record. Called about once a second.
    fn advance(&mut self, elapsed: Duration) -> anyhow::Result<()>;

    /// Checks that the programs have done their work.
    fn end(&mut self) -> anyhow::Result<()>;
}

/// A kind of program group that we can record.
pub struct Subject {
    pub name: &'static str,
    pub about: &'static str,
    /// Default length of a record, in seconds.
    pub seconds: u64,
    start: fn(&Path) -> anyhow::Result<Box<dyn Subjects>>,
}

pub const SUBJECTS: &[Subject] = &[
    Subject {
        name: "redis",
        about: "three redis servers with the same data; each changes a twentieth every 5 s",
        seconds: 30,
        start: redis,
    },
    Subject {
        name: "mariadb",
        about: "three MariaDB servers with the same table; each updates one row in 27 every 5 s",
        seconds: 30,
        start: mariadb,
    },
    Subject {
        name: "python",
        about: "three Python interpreters with the same table read by pandas",
        seconds: 15,
        start: python,
    },
    Subject {
        name: "java",
        about: "three Java servers that replace 1 % of their data every second",
        seconds: 30,
        start: java,
    },
    Subject {
        name: "guests-build",
        about: "four QEMU guests that boot, rest for 10 s, and compile the same sources with gcc's cc1",
        seconds: 100,
        start: |scratch| guests(scratch, GuestWork::Build),
    },
    Subject {
        name: "guests-web",
        about: "four QEMU guests that boot, rest for 10 s, and serve the same site with busybox httpd",
        seconds: 100,
        start: |scratch| guests(scratch, GuestWork::Web),
    },
];

impl Subject {
    pub fn named(name: &str) -> Option<&'static Self> {
        SUBJECTS.iter().find(|subject| subject.name == name)
    }

    /// Creates the data in a scratch directory and starts the programs. Dropping the results ends them and deletes it.
    pub fn start(&self) -> anyhow::Result<(Box<dyn Subjects>, TempDir)> {
        let scratch = scratch()?;
        let subjects = (self.start)(scratch.path()).with_context(|| self.name)?;
        Ok((subjects, scratch))
    }
}

/// A schedule with one turn every [`CHANGE_EVERY`].
#[derive(Default)]
struct Turns(u32);

impl Turns {
    /// The number of the next turn, if it's due. We catch up on late turns one call at a time.
    fn due(&mut self, elapsed: Duration) -> Option<u64> {
        let next = self.0 + 1;
        if elapsed < CHANGE_EVERY * next {
            return None;
        }
        self.0 = next;
        Some(next.into())
    }
}

/// Instances of one program.
struct Group<T> {
    instances: Vec<T>,
    turns: Turns,
    /// Changes the data of an instance, given the instance's number and the turn's.
    change: fn(&mut T, u64, u64) -> anyhow::Result<()>,
}

fn group<T: Target + Send + 'static>(
    start: impl Fn(usize) -> anyhow::Result<T>,
    change: fn(&mut T, u64, u64) -> anyhow::Result<()>,
) -> anyhow::Result<Box<dyn Subjects>> {
    let instances = (0..INSTANCES).map(start).collect::<anyhow::Result<_>>()?;
    Ok(Box::new(Group { instances, turns: Turns::default(), change }))
}

impl<T: Target + Send> Subjects for Group<T> {
    fn pids(&self) -> Vec<i32> {
        self.instances.iter().map(Target::pid).collect()
    }

    fn advance(&mut self, elapsed: Duration) -> anyhow::Result<()> {
        let Some(turn) = self.turns.due(elapsed) else { return Ok(()) };
        for (number, instance) in (0..).zip(&mut self.instances) {
            (self.change)(instance, number, turn)?;
        }
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        for instance in &mut self.instances {
            instance.check()?;
        }
        Ok(())
    }
}

fn redis(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let data = RedisData::make(scratch, REDIS_KEYS)?;
    // Keys differ between servers and alternate between turns: a tenth of them changes, the others never do.
    group(
        |instance| data.start(scratch, instance),
        |server, number, turn| server.change(REDIS_KEYS, number + turn % 2 * INSTANCES as u64),
    )
}

fn mariadb(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let data = MariaDbData::make(scratch, MARIADB_ROWS)?;
    group(
        |instance| data.start(scratch, instance),
        |server, number, turn| server.update(number + turn * INSTANCES as u64, number),
    )
}

fn python(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let data = PythonData::make(PythonTools::find()?, scratch, PYTHON_ROWS, PYTHON_OWN_MIB)?;
    group(|instance| data.start(instance), |_, _, _| Ok(()))
}

fn java(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let program = JavaProgram::make(JavaTools::find()?, scratch, JAVA_HEAP_MIB)?;
    group(|instance| program.start(instance), |_, _, _| Ok(()))
}

/// Guests and their progress.
struct GuestSubjects {
    started: Vec<WorkingGuest>,
    booted: Option<Duration>,
    working: bool,
}

fn guests(scratch: &Path, work: GuestWork) -> anyhow::Result<Box<dyn Subjects>> {
    let image = WorkingGuests::make(scratch, GUEST_MIB, work)?;
    let started = (0..GUESTS).map(|instance| image.start(instance)).collect::<anyhow::Result<_>>()?;
    Ok(Box::new(GuestSubjects { started, booted: None, working: false }))
}

impl Subjects for GuestSubjects {
    fn pids(&self) -> Vec<i32> {
        self.started.iter().map(WorkingGuest::pid).collect()
    }

    fn advance(&mut self, elapsed: Duration) -> anyhow::Result<()> {
        match self.booted {
            None => {
                self.started.iter_mut().try_for_each(WorkingGuest::ready)?;
                // We waited long for the boot, so let the next call supply the time of its end.
                self.booted = Some(Duration::MAX);
            }
            Some(Duration::MAX) => self.booted = Some(elapsed),
            Some(booted) if !self.working && elapsed >= booted + REST => {
                self.started.iter_mut().try_for_each(WorkingGuest::work)?;
                self.working = true;
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        ensure!(self.working, "the guests were still booting at the end: record for longer");
        let done = self.started.iter_mut().map(WorkingGuest::done).collect::<anyhow::Result<Vec<_>>>()?;
        eprintln!("compiled or served by each guest: {done:?}");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_turns_are_caught_up_one_by_one() {
        let mut turns = Turns::default();
        let at = |turns: &mut Turns, seconds| turns.due(Duration::from_secs(seconds));
        assert_eq!(at(&mut turns, 0), None);
        assert_eq!(at(&mut turns, 4), None);
        assert_eq!(at(&mut turns, 5), Some(1));
        assert_eq!(at(&mut turns, 6), None);
        assert_eq!((at(&mut turns, 16), at(&mut turns, 16), at(&mut turns, 16)), (Some(2), Some(3), None));
    }
}
