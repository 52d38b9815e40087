//! Real programs at work, to be recorded: what they are, and what they are made to do meanwhile.

use super::{
    GuestWork, JavaProgram, JavaTools, MariaDb, MariaDbData, PythonData, PythonTools, Redis, RedisData, Target,
    WorkingGuest, WorkingGuests,
};
use anyhow::{Context, ensure};
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// Of each server.
const INSTANCES: usize = 3;
const GUESTS: usize = 4;
const GUEST_MIB: u64 = 192;
const REDIS_KEYS: u64 = 40_000;
const MARIADB_ROWS: u64 = 40_000;
const PYTHON_ROWS: u64 = 100_000;
const PYTHON_OWN_MIB: u64 = 16;
const JAVA_HEAP_MIB: u64 = 128;
/// Between two changes of a database.
const CHANGE_EVERY: Duration = Duration::from_secs(5);
/// How long guests do nothing between their boot and their work.
const REST: Duration = Duration::from_secs(10);

/// Programs of one kind.
pub trait Subjects: Send {
    /// Their pids.
    fn pids(&self) -> Vec<i32>;

    /// Does what is due at a time since they were first looked at. Called every second or so, and later where it takes long.
    fn go_on(&mut self, since: Duration) -> anyhow::Result<()>;

    /// Makes sure that they have done what they were meant to.
    fn end(&mut self) -> anyhow::Result<()>;
}

/// A kind of programs that can be started.
pub struct Subject {
    /// What it is called.
    pub name: &'static str,
    /// What they are and do, in a line.
    pub about: &'static str,
    /// How long a record should be, seconds.
    pub seconds: u64,
    start: fn(&Path) -> anyhow::Result<Box<dyn Subjects>>,
}

/// All there are.
pub const SUBJECTS: &[Subject] = &[
    Subject {
        name: "redis",
        about: "three redis servers with the same data, of which each changes a twentieth every 5 s",
        seconds: 30,
        start: redis,
    },
    Subject {
        name: "mariadb",
        about: "three MariaDB servers with the same table, of which each updates one row in 27 every 5 s",
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
        about: "three Java servers, of whose data 1 % is replaced every second",
        seconds: 30,
        start: java,
    },
    Subject {
        name: "guests-build",
        about: "four QEMU guests that boot, rest for 10 s, and compile the same sources with gcc's cc1",
        seconds: 100,
        start: guests_build,
    },
    Subject {
        name: "guests-web",
        about: "four QEMU guests that boot, rest for 10 s, and serve the same site with busybox httpd",
        seconds: 100,
        start: guests_web,
    },
];

impl Subject {
    /// The one of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        SUBJECTS.iter().find(|subject| subject.name == name)
    }

    /// Makes their data and starts them. They end, and their data goes, when dropped.
    pub fn start(&self) -> anyhow::Result<Box<dyn Subjects>> {
        let scratch = tempfile::Builder::new().prefix("pagefold-lab-").tempdir().context("a scratch directory")?;
        let subjects = (self.start)(scratch.path()).with_context(|| self.name)?;
        Ok(Box::new(Housed { subjects, _scratch: scratch }))
    }
}

/// Programs with the directory of their data, which goes after them.
struct Housed {
    subjects: Box<dyn Subjects>,
    _scratch: TempDir,
}

impl Subjects for Housed {
    fn pids(&self) -> Vec<i32> {
        self.subjects.pids()
    }

    fn go_on(&mut self, since: Duration) -> anyhow::Result<()> {
        self.subjects.go_on(since)
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.subjects.end()
    }
}

/// Every so often.
#[derive(Default)]
struct Turns(u32);

impl Turns {
    /// The number of the turn that is due, if one is.
    fn due(&mut self, since: Duration) -> Option<u64> {
        let due = since >= CHANGE_EVERY * (self.0 + 1);
        self.0 += u32::from(due);
        due.then_some(self.0.into())
    }
}

struct Redises(Vec<Redis>, Turns);

fn redis(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let data = RedisData::make(scratch, REDIS_KEYS)?;
    let servers = (0..INSTANCES).map(|instance| data.start(scratch, instance)).collect::<anyhow::Result<_>>()?;
    Ok(Box::new(Redises(servers, Turns::default())))
}

impl Subjects for Redises {
    fn pids(&self) -> Vec<i32> {
        self.0.iter().map(Target::pid).collect()
    }

    fn go_on(&mut self, since: Duration) -> anyhow::Result<()> {
        let Some(turn) = self.1.due(since) else { return Ok(()) };
        for (instance, server) in (0..).zip(&mut self.0) {
            // Other keys in each, and in every other turn: a tenth of them is in use, the others stay.
            server.change(REDIS_KEYS, instance + turn % 2 * INSTANCES as u64)?;
        }
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(|server| server.check().map(drop))
    }
}

struct MariaDbs(Vec<MariaDb>, Turns);

fn mariadb(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let data = MariaDbData::make(scratch, MARIADB_ROWS)?;
    let servers = (0..INSTANCES).map(|instance| data.start(scratch, instance)).collect::<anyhow::Result<_>>()?;
    Ok(Box::new(MariaDbs(servers, Turns::default())))
}

impl Subjects for MariaDbs {
    fn pids(&self) -> Vec<i32> {
        self.0.iter().map(Target::pid).collect()
    }

    fn go_on(&mut self, since: Duration) -> anyhow::Result<()> {
        let Some(turn) = self.1.due(since) else { return Ok(()) };
        for (instance, server) in (0..).zip(&mut self.0) {
            server.update(instance + turn * INSTANCES as u64, instance)?;
        }
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(|server| server.check().map(drop))
    }
}

/// Programs that need nobody to go on.
struct Alone<T>(Vec<T>);

fn python(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let data = PythonData::make(PythonTools::find()?, scratch, PYTHON_ROWS, PYTHON_OWN_MIB)?;
    Ok(Box::new(Alone((0..INSTANCES).map(|instance| data.start(instance)).collect::<anyhow::Result<_>>()?)))
}

fn java(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    let program = JavaProgram::make(JavaTools::find()?, scratch, JAVA_HEAP_MIB)?;
    Ok(Box::new(Alone((0..INSTANCES).map(|instance| program.start(instance)).collect::<anyhow::Result<_>>()?)))
}

impl<T: Target + Send> Subjects for Alone<T> {
    fn pids(&self) -> Vec<i32> {
        self.0.iter().map(Target::pid).collect()
    }

    fn go_on(&mut self, _: Duration) -> anyhow::Result<()> {
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.0.iter_mut().try_for_each(|program| program.check().map(drop))
    }
}

/// GuestSubjects, and how far they are.
struct GuestSubjects {
    started: Vec<WorkingGuest>,
    booted: Option<Duration>,
    working: bool,
}

fn guests_build(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    guests(scratch, GuestWork::Build)
}

fn guests_web(scratch: &Path) -> anyhow::Result<Box<dyn Subjects>> {
    guests(scratch, GuestWork::Web)
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

    fn go_on(&mut self, since: Duration) -> anyhow::Result<()> {
        match self.booted {
            None => {
                self.started.iter_mut().try_for_each(WorkingGuest::ready)?;
                // As of the next time: this one was long ago.
                self.booted = Some(Duration::MAX);
            }
            Some(Duration::MAX) => self.booted = Some(since),
            Some(booted) if !self.working && since >= booted + REST => {
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
    fn turns_come_one_by_one() {
        let mut turns = Turns::default();
        let at = |turns: &mut Turns, seconds| turns.due(Duration::from_secs(seconds));
        assert_eq!(at(&mut turns, 0), None);
        assert_eq!(at(&mut turns, 4), None);
        assert_eq!(at(&mut turns, 5), Some(1));
        assert_eq!(at(&mut turns, 6), None);
        // Late ones are made up for.
        assert_eq!((at(&mut turns, 16), at(&mut turns, 16), at(&mut turns, 16)), (Some(2), Some(3), None));
    }
}
