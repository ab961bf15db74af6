//! An executor of the user's, as an operation under way sees it. It is asked where no lock is held (I9): what it is to hear is
//! kept until then, and so is what it leaves behind.

use super::execution::{Execution, Executor, Step, Turn};
use super::schedule::Program;
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Drops what is the user's where no lock is held.
pub(crate) type Retire = Box<dyn Fn(Box<dyn Any + Send>) + Send>;

/// What an execution is to hear.
#[derive(Debug)]
enum News {
    Arrived(Step),
    Done(Turn),
}

pub(super) struct Foreign {
    /// Until it is dropped.
    users: Option<Users>,
    /// What this rank has to do, until it has heard.
    turns: Option<Vec<Turn>>,
    news: VecDeque<News>,
    /// It has given what cannot be done, or panicked.
    failed: bool,
    retire: Retire,
}

struct Users {
    executor: Arc<dyn Executor>,
    execution: Option<Box<dyn Execution>>,
}

impl std::fmt::Debug for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Foreign")
            .field("news", &self.news)
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl Foreign {
    pub fn new(executor: Arc<dyn Executor>, turns: Vec<Turn>, retire: Retire) -> Self {
        let users = Some(Users { executor, execution: None });
        Self { users, turns: Some(turns), news: VecDeque::new(), failed: false, retire }
    }

    /// A message has come.
    pub fn arrived(&mut self, step: Step) {
        self.news.push_back(News::Arrived(step));
    }

    /// A turn that was given is over.
    pub fn done(&mut self, turn: Turn) {
        self.news.push_back(News::Done(turn));
    }

    /// Whether it has something to hear, and may have something to say then.
    pub fn has_news(&self) -> bool {
        !self.failed && (self.turns.is_some() || !self.news.is_empty())
    }

    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Tells it all, for which it has to begin first.
    pub fn hear(&mut self, program: &Program) {
        if let Some(turns) = self.turns.take() {
            self.ask(|users| users.execution = Some(users.executor.begin(program, &turns)));
        }
        while let Some(news) = self.news.pop_front() {
            self.ask(|users| {
                if let Some(execution) = &mut users.execution {
                    match news {
                        News::Arrived(step) => execution.arrived(step),
                        News::Done(turn) => execution.done(turn),
                    }
                }
            });
        }
    }

    /// What is to be done now.
    pub fn next(&mut self) -> Option<Turn> {
        self.ask(|users| users.execution.as_mut().and_then(|execution| execution.next()))?
    }

    /// Asks it something. Nothing is asked any more of one that has failed.
    fn ask<R>(&mut self, question: impl FnOnce(&mut Users) -> R) -> Option<R> {
        let users = self.users.as_mut().filter(|_| !self.failed)?;
        let answer = catch_unwind(AssertUnwindSafe(|| question(users)));
        if answer.is_err() {
            self.fail("it panicked");
        }
        answer.ok()
    }

    #[cold]
    pub fn fail(&mut self, why: &str) {
        self.failed = true;
        let name = || self.users.as_ref().map(|users| users.executor.name().to_owned());
        let name = catch_unwind(AssertUnwindSafe(name)).ok().flatten().unwrap_or_default();
        tracing::error!(executor = name, why, "an executor of the user's failed");
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(Users { executor, execution }) = self.users.take() {
            (self.retire)(Box::new((execution, executor)));
        }
    }
}
