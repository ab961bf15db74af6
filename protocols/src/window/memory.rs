//! The memory of windows and regions: whose it is, how each part of it is reached, and its views through other contexts.

use super::Stage;
use super::words::NOT_THE_OWNERS;
use crate::datatype::LayoutAccess;
use crate::operation::Pending;
use posthaste_core::context::Face;
use posthaste_core::device::{RemoteMemory, Rouse};
use posthaste_core::engine::{Gates, Held, Rma};
use posthaste_core::memory::{SharedSlice, SharedWords, WordLen, Words as _};
use posthaste_core::slot::Outcome;
use posthaste_core::sync::lock;
use posthaste_core::{ContextId, Device, Endpoint, Fault, Handle, Rank, RmaError, Scope, WindowId};
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, Weak};

/// One rank's part of a window, or a region: where it is and how it is reached.
pub(crate) struct Part {
    pub rank: Rank,
    pub mapped: Option<SharedSlice>,
    pub len: u64,
    /// Where it is, as its owner names it.
    pub place: u64,
    /// Key in the context's table of remote memory.
    pub remote: usize,
    /// Rouses those who wait for what is written there, in whatever context; as long as it is mapped.
    pub(super) rouser: Option<Rouser>,
    /// Which incarnation of the rank has it.
    pub incarnation: u32,
}

impl Part {
    fn new(memory: &RemoteMemory, remote: usize, device: &Arc<dyn Device>, handle: &Handle) -> Part {
        let RemoteMemory { rank, offset: place, len, mapped, incarnation } = *memory;
        // What cannot be roused is not written at once.
        let rouser = mapped.and_then(|_| Rouser::of(rank, device, handle));
        Part { rank, mapped, len, place, remote, rouser, incarnation }
    }

    /// The same part by another key.
    fn at(&self, remote: usize) -> Part {
        Part { remote, rouser: self.rouser.clone(), ..*self }
    }

    fn memory(&self) -> RemoteMemory {
        let Part { rank, mapped, len, place: offset, incarnation, .. } = *self;
        RemoteMemory { rank, offset, len, mapped, incarnation }
    }
}

/// Rouses those who wait on a rank's memory.
#[derive(Clone)]
pub(super) struct Rouser {
    rouse: Arc<dyn Rouse>,
    /// What says whether there are any, if it is one word.
    sign: Option<SharedWords>,
}

impl Rouser {
    fn new(rouse: Arc<dyn Rouse>) -> Rouser {
        let sign = rouse.sign().map(SharedWords::new);
        Rouser { rouse, sign }
    }

    fn of(rank: Rank, device: &Arc<dyn Device>, handle: &Handle) -> Option<Rouser> {
        let of = |context| device.rouser(Endpoint::new(rank, ContextId(context))).map(Rouser::new);
        let own = || (rank == handle.me().rank).then(|| Rouser::new(Arc::new(OwnRouser(handle.clone()))));
        match handle.kin_count() {
            1 => of(0).or_else(own),
            contexts => {
                let all: Option<Box<[Rouser]>> = (0..contexts).map(of).collect();
                all.map(|all| Rouser::new(Arc::new(All(all)))).or_else(own)
            }
        }
    }

    /// Whether somebody may be waiting: to be asked behind a fence behind what was written.
    #[inline(always)]
    fn is_asked(&self) -> bool {
        self.sign.is_none_or(|sign| sign.load(0, Ordering::Relaxed) != 0)
    }

    #[inline(always)]
    fn rouse(&self) {
        compiler_fence(Ordering::SeqCst);
        if self.is_asked() {
            self.rouse.rouse();
        }
    }
}

/// Rouses all contexts of a rank.
struct All(Box<[Rouser]>);

impl Rouse for All {
    fn rouse(&self) {
        self.0.iter().for_each(Rouser::rouse);
    }
}

/// Rouses those who wait on this rank's own memory, in whatever context, where no device does.
struct OwnRouser(Handle);

impl Rouse for OwnRouser {
    fn rouse(&self) {
        self.0.rouse();
    }
}

/// Where an access to mapped memory goes: what can be said of it before anybody asks whether it may go ahead.
#[derive(Clone, Copy)]
pub(super) struct Aim<'m> {
    memory: &'m Memory,
    part: &'m Part,
    bytes: SharedSlice,
}

impl Aim<'_> {
    /// Whether an atomic operation on a word of that length may be carried out there.
    #[inline(always)]
    pub fn is_word(&self, len: WordLen) -> bool {
        self.bytes.is_word(len)
    }

    /// Makes the access to its bytes, if it may go ahead inline, and only while whoever forbids it can wait for its end.
    ///
    /// All else is done before or behind it: of two processors that change one word in turn each keeps the other waiting from
    /// when it asks for the word's line until it has changed it.
    #[inline(always)]
    pub fn reach<R>(&self, access: impl FnOnce(SharedSlice) -> R) -> Option<R> {
        let _amid = self.memory.gates.pass();
        self.memory.admits(self.part).then(|| access(self.bytes))
    }

    /// As [`reach`](Self::reach), for what changes the bytes: whoever waits there is roused.
    #[inline(always)]
    pub fn change<R>(&self, access: impl FnOnce(SharedSlice) -> R) -> Option<R> {
        // What cannot be roused is not written at once.
        let rouser = self.part.rouser.as_ref()?;
        let changed = self.reach(access)?;
        rouser.rouse();
        Some(changed)
    }
}

impl Memory {
    /// Whether an access to a part may be made, to be asked amid a pass: one load each for "alive" and "nothing precedes", as the
    /// window may have been freed just now.
    #[inline(always)]
    fn admits(&self, part: &Part) -> bool {
        self.alive.load(Ordering::Relaxed) && self.gates.is_open(part.rank)
    }

    /// Makes changes in these parts amid one pass, if all of them may be changed. `change` runs nothing of the user's.
    #[inline(always)]
    pub(super) fn change_all<'m>(
        &self,
        parts: impl Iterator<Item = &'m Part> + Clone,
        change: impl FnOnce(),
    ) -> bool {
        let amid = self.gates.pass();
        // What cannot be roused is not written at once.
        if !parts.clone().all(|part| part.rouser.is_some() && self.admits(part)) {
            return false;
        }
        change();
        drop(amid);
        Self::rouse_all(parts);
        true
    }

    /// Rouses those who wait on what was changed in these parts.
    #[inline(always)]
    fn rouse_all<'m>(parts: impl Iterator<Item = &'m Part> + Clone) {
        // Behind all changes; without a branch for each, because they may go anywhere.
        compiler_fence(Ordering::SeqCst);
        let rousers = parts.filter_map(|part| part.rouser.as_ref());
        if rousers.clone().fold(false, |asked, rouser| asked | rouser.is_asked()) {
            rousers.for_each(Rouser::rouse);
        }
    }
}

/// No part of some memory is this rank's own: it is a region.
pub(super) const NO_OWN_PART: usize = usize::MAX;

/// What windows and regions have in common.
pub(crate) struct Memory {
    pub id: WindowId,
    pub handle: Handle,
    pub gates: posthaste_core::sync::Arc<Gates>,
    pub parts: Box<[Part]>,
    /// Cleared when it is freed.
    pub alive: AtomicBool,
    /// What was begun before it ended has been started: nothing is any more. Set in the context that starts it.
    ended: AtomicBool,
    pub size: u32,
    /// Which part is this rank's own; of a region none counts as that ([`NO_OWN_PART`]).
    pub(super) own: usize,
    pub(super) device: Arc<dyn Device>,
    /// How layouts are reached where memory is not mapped.
    pub(super) layouts: LayoutAccess,
    /// Those of the parts; of a view they are with its home.
    _keys: Option<Keys>,
    /// What this is a view of.
    home: Option<Arc<Memory>>,
    /// Views of this through other contexts, which end with it.
    views: Mutex<Vec<View>>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory")
            .field("id", &self.id)
            .field("parts", &self.parts.len())
            .finish_non_exhaustive()
    }
}

impl Memory {
    /// Whether an operation may still be started: asked in the context that starts it. Whoever frees the memory comes behind it
    /// there, and waits for it, or is seen here.
    pub(crate) fn still_there(&self) -> Result<(), RmaError> {
        if self.ended.load(Ordering::Relaxed) { Err(RmaError::NoSuchWindow(self.id)) } else { Ok(()) }
    }

    /// Starts what cannot be done at once, where the context has its turn.
    pub(super) fn start(self: &Arc<Self>, part: &Part, offset: u64, rma: Rma<'static>, moved: u64) -> Stage {
        let (memory, remote) = (self.clone(), part.remote);
        let target = Endpoint::new(part.rank, self.handle.me().context);
        let held = self.hold(part);
        Stage::Posted(self.handle.post(move |scope: &mut Scope<'_>| {
            memory.still_there()?;
            let started = scope.rma(target, remote, offset, rma)?;
            drop(held);
            Ok(started.map(|ticket| Pending::new(memory.handle.clone(), ticket, None).moving(moved)))
        }))
    }

    /// Until what is returned is dropped nothing is done at once at the rank that has a part, which would overtake what has yet
    /// to be started.
    pub(super) fn hold(&self, part: &Part) -> Option<Held> {
        // Whether or not this part is mapped, others of that rank's may be.
        let is_at_once = !self.gates.goes_over_send(part.rank);
        is_at_once.then(|| Gates::hold(&self.gates, part.rank))
    }

    /// As [`hold`](Self::hold), at all parts.
    pub(crate) fn hold_all(&self) -> Vec<Held> {
        self.parts.iter().filter_map(|part| self.hold(part)).collect()
    }

    /// Which rank of the job that rank is here; a region is memory of its owner, whoever is named.
    pub(super) fn job_rank_of(&self, rank: Rank) -> Option<Rank> {
        let part = if self.own == NO_OWN_PART { 0 } else { rank.index() };
        self.parts.get(part).map(|part| part.rank)
    }

    /// Why nothing comes any more of what is awaited in it, if it was freed.
    pub(super) fn freed(&self) -> Option<RmaError> {
        (!self.alive.load(Ordering::Relaxed)).then_some(RmaError::NoSuchWindow(self.id))
    }

    /// The rank of the job that has a part, and else that which was asked for.
    pub(super) fn rank_of(&self, part: usize, rank: Rank) -> Rank {
        self.parts.get(part).map_or(rank, |part| part.rank)
    }

    /// Whether accesses to a part that cannot be made at once are made here nevertheless, in their turn.
    pub(super) fn waits_for_turn(&self, part: &Part) -> bool {
        part.mapped.is_some() && part.rouser.is_some() && !self.gates.goes_over_send(part.rank)
    }

    /// Makes an access to a part behind what is queued for its rank: see [`waits_for_turn`](Self::waits_for_turn). It ends with
    /// what the access returns. `changes`: whoever waits there is roused.
    pub(super) fn in_turn(
        self: &Arc<Self>,
        part: &Part,
        changes: bool,
        access: impl FnOnce(SharedSlice) -> Outcome + Send + 'static,
    ) -> Stage {
        let (memory, held, mapped) = (self.clone(), self.hold(part), part.mapped);
        let rouser = if changes { part.rouser.clone() } else { None };
        let (rank, incarnation) = (part.rank, part.incarnation);
        let target = Endpoint::new(rank, self.handle.me().context);
        Stage::Posted(self.handle.post(move |scope: &mut Scope<'_>| {
            memory.still_there()?;
            let now = scope.incarnation_of(rank);
            if incarnation < now {
                return Err(Fault::StaleHandle { rank, held: incarnation, now }.into());
            }
            let turn = move || {
                let outcome = access(mapped.ok_or(Fault::NoSuchMemory(rank))?);
                if let Some(rouser) = rouser {
                    rouser.rouse();
                }
                outcome
            };
            let ticket = scope.in_turn(target, Box::new(turn))?;
            drop(held);
            Ok(Some(Pending::new(memory.handle.clone(), ticket, None)))
        }))
    }

    /// From here on nothing is started: behind what was posted to the context before.
    fn end_in_context(self: &Arc<Self>) {
        let memory = self.clone();
        self.handle.post_run(move |_| memory.ended.store(true, Ordering::Relaxed));
    }

    /// The part of a rank, if the access lies within it.
    #[inline]
    pub(crate) fn check(&self, part: usize, rank: Rank, offset: u64, count: u64) -> Result<&Part, RmaError> {
        if !self.alive.load(Ordering::Relaxed) {
            return Err(RmaError::NoSuchWindow(self.id));
        }
        let Some(part) = self.parts.get(part) else {
            return Err(match self.parts.first() {
                Some(only) if part == NOT_THE_OWNERS => RmaError::NotTheOwner { rank, owner: only.rank },
                _ => RmaError::UnknownRank { rank, size: self.size },
            });
        };
        if offset <= part.len && count <= part.len - offset {
            Ok(part)
        } else {
            Err(RmaError::OutOfRange { rank, offset, count, len: part.len })
        }
    }

    /// Where an access to mapped memory goes.
    #[inline(always)]
    pub(super) fn aim(&self, part: usize, offset: u64, count: u64) -> Option<Aim<'_>> {
        self.aim_within(self.parts.get(part)?, offset, count)
    }

    /// Where an access to a part that is mapped goes.
    #[inline(always)]
    pub(super) fn aim_within<'m>(&'m self, part: &'m Part, offset: u64, count: u64) -> Option<Aim<'m>> {
        Some(Aim { memory: self, part, bytes: part.mapped?.slice(offset, count)? })
    }

    /// Whether what is done with the other goes through the same context.
    pub(super) fn shares_context_with(&self, other: &Memory) -> bool {
        posthaste_core::sync::Arc::ptr_eq(self.handle.shared_state(), other.handle.shared_state())
    }

    /// The same memory through another context of the client.
    pub(super) async fn through(self: &Arc<Memory>, handle: &Handle) -> Result<Arc<Memory>, RmaError> {
        if !handle.is_kin_of(&self.handle) {
            return Err(RmaError::OtherClient);
        }
        if handle.is_closed() {
            return Err(RmaError::Fault(Fault::Shutdown));
        }
        let home = self.home.as_ref().unwrap_or(self);
        if !home.alive.load(Ordering::SeqCst) {
            return Err(RmaError::NoSuchWindow(home.id));
        }
        if handle.me().context == home.handle.me().context {
            return Ok(home.clone());
        }
        let view = |keys: &[usize]| {
            Arc::new(Memory {
                id: home.id,
                handle: handle.clone(),
                gates: home.gates.clone(),
                parts: home.parts.iter().zip(keys).map(|(part, key)| part.at(*key)).collect(),
                alive: AtomicBool::new(true),
                ended: AtomicBool::new(false),
                size: home.size,
                own: home.own,
                device: home.device.clone(),
                layouts: home.layouts,
                _keys: None,
                home: Some(home.clone()),
                views: Mutex::default(),
            })
        };
        if let Some(known) = home.known_view(handle, None, view)? {
            return Ok(known);
        }
        let keys = Keys::add(handle, home.parts.iter().map(Part::memory).collect()).await;
        let made = home.known_view(handle, Some(keys), view)?;
        made.ok_or(RmaError::NoSuchWindow(home.id))
    }

    /// The view through a context, made anew if nobody has it any more. None: there never was one, and there are no keys.
    fn known_view(
        &self,
        handle: &Handle,
        keys: Option<Keys>,
        make: impl Fn(&[usize]) -> Arc<Memory>,
    ) -> Result<Option<Arc<Memory>>, RmaError> {
        let context = handle.me().context;
        // Given up where the lock is not held any more: that may run what others have posted.
        let mut spare = None;
        let mut views = lock(&self.views);
        let known = views.iter_mut().find(|view| view.keys.handle.me().context == context);
        let found = match (known, keys) {
            (None, None) => return Ok(None),
            (None, Some(keys)) => {
                let live = make(&keys.keys);
                views.push(View { keys, live: Arc::downgrade(&live) });
                live
            }
            // Somebody else may have been quicker, whose keys serve as well.
            (Some(known), keys) => {
                spare = keys;
                known.live.upgrade().unwrap_or_else(|| {
                    let live = make(&known.keys.keys);
                    known.live = Arc::downgrade(&live);
                    live
                })
            }
        };
        // Under the lock: whoever frees it ends the views that are listed.
        let alive = self.alive.load(Ordering::SeqCst);
        drop(views);
        drop(spare);
        if alive { Ok(Some(found)) } else { Err(RmaError::NoSuchWindow(self.id)) }
    }

    /// Nothing is started on it any more, whichever view of it this is. Returns the contexts through which it was used, or none
    /// if it was ended before.
    pub(super) fn end(self: &Arc<Self>) -> Option<Vec<Handle>> {
        if let Some(home) = &self.home {
            return home.end();
        }
        if !self.alive.swap(false, Ordering::SeqCst) {
            return None;
        }
        self.end_in_context();
        let mut contexts = vec![self.handle.clone()];
        let mut ended = Vec::new();
        for view in lock(&self.views).iter() {
            if let Some(live) = view.live.upgrade() {
                live.alive.store(false, Ordering::SeqCst);
                ended.push(live);
            }
            contexts.push(view.keys.handle.clone());
        }
        // Not under the lock: each may run what others have posted to its context.
        ended.iter().for_each(|live| live.end_in_context());
        // Who still waits on a word of it, through whichever context, waits in vain.
        for context in self.handle.all_kin() {
            context.post_run(|scope| scope.wake_watchers());
        }
        Some(contexts)
    }
}

/// What was made of some memory for another context. Its keys stay as long as the memory: an operation may go on when nobody
/// has the view any more.
struct View {
    keys: Keys,
    live: Weak<Memory>,
}

/// What memory is made of besides its parts.
pub(super) struct Made {
    pub id: WindowId,
    pub handle: Handle,
    pub gates: posthaste_core::sync::Arc<Gates>,
    pub device: Arc<dyn Device>,
    pub layouts: LayoutAccess,
    pub size: u32,
    pub own: usize,
}

impl Made {
    pub async fn with(self, remotes: Vec<RemoteMemory>) -> Arc<Memory> {
        let Made { id, handle, gates, device, layouts, size, own } = self;
        let keys = Keys::add(&handle, remotes.clone()).await;
        let parts = remotes.iter().zip(&keys.keys);
        let parts = parts.map(|(remote, key)| Part::new(remote, *key, &device, &handle)).collect();
        let bytes = remotes.get(own).map_or(0, |part| part.len);
        tracing::debug!(me = %handle.me(), window = %id, parts = remotes.len(), bytes, "window made");
        let (alive, ended) = (AtomicBool::new(true), AtomicBool::new(false));
        let (_keys, home, views) = (Some(keys), None, Mutex::default());
        Arc::new(Memory {
            id,
            handle,
            gates,
            parts,
            alive,
            ended,
            size,
            own,
            device,
            layouts,
            _keys,
            home,
            views,
        })
    }
}

/// Entries of a context's table of remote memory, given up with this.
struct Keys {
    handle: Handle,
    keys: Box<[usize]>,
}

impl Keys {
    async fn add(handle: &Handle, memory: Vec<RemoteMemory>) -> Keys {
        let owner = handle.clone();
        let posted = handle.post(move |scope: &mut Scope<'_>| {
            let keys = memory.into_iter().map(|memory| scope.table().remote.insert(memory)).collect();
            // An owner, so that they are given up if nobody waits for them any more.
            Keys { handle: owner, keys }
        });
        std::future::poll_fn(|cx| posted.poll(cx)).await
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let keys = std::mem::take(&mut self.keys);
        self.handle.post_run(move |scope| scope.retire_remote(keys));
    }
}
