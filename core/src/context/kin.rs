//! The contexts of a client as one: they have their memory in common, so that a task of one of them may wait for what
//! another one brings in.

use super::Shared;
use crate::sync::{AtomicU32, LightFence, Ordering};
use crate::sysdep::Sysdep;
use std::sync::{Arc, OnceLock, Weak};

/// In how many contexts of a client tasks wait on memory: a Dekker handshake between who goes to sleep, which says so and
/// then looks at the memory once more, and who has written it, which then looks whether anybody said so.
#[derive(Debug)]
pub struct Watchers {
    count: AtomicU32,
    light: LightFence,
}

impl Watchers {
    /// Nobody. `light`: what writers do.
    #[must_use]
    pub fn new(light: LightFence) -> Watchers {
        Watchers { count: AtomicU32::new(0), light }
    }

    /// One more context; its tasks' memory is looked at once more behind this. `heavy` makes the barrier that a light fence
    /// of the writers relies on.
    pub fn begin(&self, heavy: impl FnOnce()) {
        self.count.fetch_add(1, Ordering::Relaxed);
        heavy();
    }

    /// One less.
    pub fn end(&self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Behind a write: whether there are more than these.
    #[inline]
    #[must_use]
    pub fn are_more_than(&self, known: u32) -> bool {
        self.light.issue();
        self.count.load(Ordering::Relaxed) > known
    }
}

/// What the contexts of a client share.
pub struct Kin {
    count: u16,
    contexts: OnceLock<Box<[Weak<Shared>]>>,
    watchers: Watchers,
    /// Told of every rank that was started again once all contexts can reach it, and when one of them ends.
    news: Arc<tokio::sync::Notify>,
    /// Where the client was opened.
    runtime: OnceLock<tokio::runtime::Id>,
}

impl Kin {
    /// So many contexts, which are yet to be made.
    #[must_use]
    pub fn new(count: u16, sysdep: &dyn Sysdep) -> Arc<Kin> {
        let light = LightFence::beside(sysdep);
        Arc::new(Kin {
            count,
            contexts: OnceLock::new(),
            watchers: Watchers::new(light),
            news: Arc::default(),
            runtime: OnceLock::new(),
        })
    }

    /// The client is opened in that runtime, with which it ends.
    pub(super) fn opened_in(&self, runtime: &tokio::runtime::Handle) {
        self.runtime.get_or_init(|| runtime.id());
    }

    pub(super) fn is_opened_in(&self, runtime: &tokio::runtime::Handle) -> bool {
        self.runtime.get() == Some(&runtime.id())
    }

    /// Which they are. Said once.
    pub fn meet<'c>(&self, contexts: impl Iterator<Item = &'c Arc<Shared>>) {
        let known = self.contexts.set(contexts.map(Arc::downgrade).collect());
        debug_assert!(known.is_ok(), "contexts are made once");
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Arc<Shared>> {
        self.contexts.get().into_iter().flatten().filter_map(Weak::upgrade)
    }

    fn others(&self, than: &Shared) -> impl Iterator<Item = Arc<Shared>> {
        let own = than.me.context;
        self.all().filter(move |context| context.me.context != own)
    }

    /// What is told of ranks that were started again, and of the end of a context: look behind it which.
    pub(crate) fn news(&self) -> &Arc<tokio::sync::Notify> {
        &self.news
    }

    pub(super) fn count(&self) -> u16 {
        self.count
    }
}

impl Shared {
    /// Says whether tasks of this context wait on memory. Under the token, and before the last look at that memory.
    pub(super) fn set_watching(&self, watching: bool) {
        if self.watching.load(Ordering::Relaxed) == watching {
            return;
        }
        self.watching.store(watching, Ordering::SeqCst);
        match (self.has_kin, watching) {
            (true, true) => self.kin.watchers.begin(|| self.sysdep.heavy_fence()),
            (true, false) => self.kin.watchers.end(),
            (false, _) => {}
        }
        // Partner: that of whoever writes the rank's memory by itself.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Something has come in by this context: the others' tasks may wait for it.
    #[inline]
    pub(super) fn tell_kin(&self) {
        if self.has_kin && self.kin.watchers.are_more_than(u32::from(self.watching.load(Ordering::Relaxed))) {
            self.rouse_kin();
        }
    }

    #[cold]
    pub(super) fn rouse_kin(&self) {
        self.kin.others(self).for_each(|other| other.rouse_watchers());
    }

    /// Has the driver, or the owner, look at memory that tasks wait on.
    pub(super) fn rouse_watchers(&self) {
        if self.watching.load(Ordering::SeqCst) {
            self.driver.wake();
            self.work_posted();
        }
    }
}
