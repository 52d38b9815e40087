//! Programs that we take notes of at each check.

use super::Target;
use pagefold_report::activity::ActivityCounters;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

/// The notes of a program's checks. The last three come from the checks before, during and after a policy.
pub type Notes<T> = Rc<RefCell<Vec<T>>>;

type Look<P, T> = Box<dyn FnMut(&mut P) -> anyhow::Result<T>>;

/// A program and a note that we take before it answers, since answering allocates and writes memory.
pub struct Observed<P: ?Sized, T> {
    program: Box<P>,
    look: Look<P, T>,
    notes: Notes<T>,
}

impl<P: Target + ?Sized + 'static, T: 'static> Observed<P, T> {
    /// Returns the program, and its notes, which grow with each check.
    pub fn start(
        program: Box<P>,
        look: impl FnMut(&mut P) -> anyhow::Result<T> + 'static,
    ) -> (Box<dyn Target>, Notes<T>) {
        let notes = Notes::default();
        let observed = Self { program, look: Box::new(look), notes: Rc::clone(&notes) };
        (Box::new(observed), notes)
    }
}

impl<P: Target + ?Sized, T> Target for Observed<P, T> {
    fn name(&self) -> &str {
        self.program.name()
    }

    fn pid(&self) -> i32 {
        self.program.pid()
    }

    fn check(&mut self) -> anyhow::Result<String> {
        let note = (self.look)(&mut self.program)?;
        self.notes.borrow_mut().push(note);
        self.program.check()
    }

    fn counters(&mut self) -> anyhow::Result<Option<ActivityCounters>> {
        self.program.counters()
    }

    fn heap(&self) -> Option<Range<u64>> {
        self.program.heap()
    }
}
