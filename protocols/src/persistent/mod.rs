//! Persistent collectives (D29): recorded once, replayed each time.
//!
//! ```text
//!   wait for the children's counters -> combine -> replay "up" -> wait for the parent's counter -> replay "down"
//! ```
//! A collective is a binomial tree of recorded sections: a message up to the parent, one down to each child. Between two of
//! them a rank waits for a counter of messages and holds nothing, no FIFO and no completion. A neighbour's message has a
//! place of its own here, which is free again before the next one can come: the next contribution of a child depends on a
//! result to which this rank has added the last one, and where no result goes up, children say that they have taken theirs.
//!
//! Where all send to all there is one section with a message to every other member, and two places for each: who gives
//! its next part has got this rank's last one, and cannot give another before it gets the next.

mod board;
mod call;
mod turn;

pub(crate) use call::Making;
pub use call::{PersistentCall, PersistentKind};

use crate::collective::{CollectiveError, Datum, Reduce};
use crate::group::Group;
use crate::handler::ActiveMessage;
use crate::pattern::record_apart;
use crate::window::Region;
use board::{Board, Inbox, Key, Kind, Registered, info_of};
use call::{all_ready, bytes_of};
use posthaste_core::engine::PatternError;
use posthaste_core::sync::lock;
use posthaste_core::{Client, Fault, Handle, Messager, Rank, RegisterError};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use thiserror::Error;
use turn::{Core, Use};
use zerocopy::IntoBytes;

/// Why a persistent collective was not made, or ended.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use posthaste::persistent::PersistentError;
/// use posthaste::{CollectiveError, Reduce};
/// let job = posthaste::solo().await?;
/// let mut sum = job.persistent().all_reduce::<u32>(&job.world(), 3, &Reduce::sum()).await?;
/// let error = sum.run(&mut [1, 2]).await.unwrap_err();
/// assert!(matches!(error, PersistentError::Collective(CollectiveError::Length { len: 2, expected: 3, .. })));
/// sum.run(&mut [1, 2, 3]).await?; // nothing was done, so it can be used
/// # job.leave().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PersistentError {
    /// It could not be agreed upon, or what was given does not fit.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// Its messages could not be recorded.
    #[error(transparent)]
    Pattern(#[from] PatternError),
    /// A rank is lost or has left, and with it all uses of the collective from that one on, on all members.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The members have called for different ones; it was made on none of them. Those that look alike differ in the operation
    /// by which values are combined, or in their type.
    #[error(
        "rank {rank} makes {theirs} and this rank makes {ours}: all members of a group make the same, by the same operation \
         on values of the same type, in the same order"
    )]
    Mismatch {
        /// The first member whose call is another, by its rank in the job.
        rank: Rank,
        /// What it called for.
        theirs: PersistentCall,
        /// What this rank called for.
        ours: PersistentCall,
    },
}

/// A rank's place in a binomial tree.
#[derive(Clone, Debug, Default)]
struct Tree {
    /// The parent, and which of its children this is.
    parent: Option<(Rank, u8)>,
    children: Vec<Rank>,
}

impl Tree {
    fn new(members: &[Rank], me: usize, root: usize) -> Tree {
        let size = members.len();
        let rank_of = |place: usize| members[(place + root) % size];
        let place = (me + size - root) % size;
        // Its children are those at distances below its lowest bit, the near ones first: they hold what follows.
        let reach = if place == 0 { u32::MAX } else { place.trailing_zeros() };
        let parent = (place != 0).then(|| (rank_of(place & (place - 1)), reach as u8));
        let children = (0..reach.min(usize::BITS - 1)).map(|bit| place + (1 << bit));
        Tree { parent, children: children.take_while(|child| *child < size).map(rank_of).collect() }
    }

    fn neighbours(&self) -> impl Iterator<Item = Rank> {
        self.parent.map(|(parent, _)| parent).into_iter().chain(self.children.iter().copied())
    }
}

/// Makes persistent collectives of a client. Cheap to clone.
///
/// Several may be made of a group at once; they are made one after the other, in the order of the first polls. No other operation
/// of the group is begun until they are made.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let job = posthaste::solo().await?;
/// let group = job.world();
/// // Made once, by all members in the same order, and used any number of times.
/// let mut sum = job.persistent().all_reduce::<u64>(&group, 1, &posthaste::Reduce::sum()).await?;
/// let mut tell = job.persistent().broadcast::<u64>(&group, 0, 1).await?;
/// for round in 0..10 {
///     let mut value = [round];
///     sum.run(&mut value).await?;
///     tell.run(&mut value).await?;
///     assert_eq!(value, [round * group.size() as u64]);
/// }
/// # job.leave().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Persistent {
    board: Arc<Mutex<Board>>,
    message: ActiveMessage,
    handle: Handle,
    client: Arc<Client>,
}

/// What is registered with a client before it is opened; see [`Persistent`].
#[derive(Debug)]
pub struct Registration {
    board: Arc<Mutex<Board>>,
    message: ActiveMessage,
    handle: Handle,
}

impl Registration {
    /// Registers persistent collectives with a client; once per client, before it is opened.
    ///
    /// # Errors
    /// If they are registered already.
    pub fn new(messager: &dyn Messager) -> Result<Registration, RegisterError> {
        let handle = messager.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        let board = Arc::<Mutex<Board>>::default();
        let id = messager.register(Arc::new(Registered::new(&board, &handle)))?;
        Ok(Registration { board, message: ActiveMessage::new(handle.clone(), id), handle })
    }

    /// For the opened client.
    #[must_use]
    pub fn with(self, client: Arc<Client>) -> Persistent {
        let Registration { board, message, handle } = self;
        Persistent { board, message, handle, client }
    }
}

impl Persistent {
    /// Makes a reduction of `len` values to which all members of a group contribute and which all get: collective, in the
    /// same order on all members.
    ///
    /// # Errors
    /// If its messages cannot be recorded or memory cannot be had (the other members then get [`Fault::OutOfMemory`]), the members
    /// call for different ones ([`PersistentError::Mismatch`], on all of them), or they cannot agree because a rank is lost.
    ///
    /// # Cancel safety
    /// Not cancel safe: the others wait for this rank.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use posthaste::Reduce;
    /// let job = posthaste::solo().await?;
    /// let mut gradient = job.persistent().all_reduce::<f64>(&job.world(), 3, &Reduce::sum()).await?;
    /// for step in 0..10 {
    ///     let mut values = [step as f64; 3];
    ///     gradient.run(&mut values).await?;
    ///     assert_eq!(values, [step as f64 * job.size() as f64; 3]);
    /// }
    /// # job.leave().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn all_reduce<T: Datum>(
        &self,
        group: &Group,
        len: usize,
        operation: &Reduce<T>,
    ) -> Result<PersistentAllReduce<T>, PersistentError> {
        let call = |bytes| PersistentCall { kind: PersistentKind::AllReduce, root: 0, bytes };
        let mark = operation.combiner().mark();
        let core = self.make(group, bytes_of::<T>(len).map(call), mark).await?;
        Ok(PersistentAllReduce { core, operation: operation.clone(), len })
    }

    /// Makes a broadcast of `len` values from the rank `root` of a group: collective, in the same order on all members.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce), and if the group has no such rank.
    ///
    /// # Cancel safety
    /// Not cancel safe: the others wait for this rank.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let job = posthaste::solo().await?;
    /// let mut parameters = job.persistent().broadcast::<f32>(&job.world(), 0, 2).await?;
    /// for step in 0..10 {
    ///     // Only what the root gives counts.
    ///     let mut values = if job.rank().0 == 0 { [step as f32, 0.5] } else { [0.0; 2] };
    ///     parameters.run(&mut values).await?;
    ///     assert_eq!(values, [step as f32, 0.5]);
    /// }
    /// # job.leave().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn broadcast<T: Datum>(
        &self,
        group: &Group,
        root: usize,
        len: usize,
    ) -> Result<PersistentBroadcast<T>, PersistentError> {
        if root >= group.size() {
            // As if nothing had been called.
            return Err(CollectiveError::UnknownRank { rank: root, size: group.size() }.into());
        }
        let call = |bytes| PersistentCall { kind: PersistentKind::Broadcast, root, bytes };
        let core = self.make(group, bytes_of::<T>(len).map(call), 0).await?;
        Ok(PersistentBroadcast { core, len, values: std::marker::PhantomData })
    }

    /// Makes a barrier of a group: collective, in the same order on all members.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    ///
    /// # Cancel safety
    /// Not cancel safe: the others wait for this rank.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let job = posthaste::solo().await?;
    /// let mut barrier = job.persistent().barrier(&job.world()).await?;
    /// let mut steps = 0;
    /// while steps < 10 {
    ///     steps += 1; // a step of work
    ///     barrier.run().await?; // nobody begins the next one before all have done this one
    /// }
    /// assert_eq!(steps, 10);
    /// # job.leave().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn barrier(&self, group: &Group) -> Result<PersistentBarrier, PersistentError> {
        let call = PersistentCall { kind: PersistentKind::Barrier, root: 0, bytes: 0 };
        Ok(PersistentBarrier { core: self.make(group, Ok(call), 0).await? })
    }

    /// Makes an exchange of `len` values between any two members of a group: collective, in the same order on all members.
    ///
    /// # Errors
    /// As for [`all_reduce`](Self::all_reduce).
    ///
    /// # Cancel safety
    /// Not cancel safe: the others wait for this rank.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let job = posthaste::solo().await?;
    /// let mut exchange = job.persistent().all_to_all::<u32>(&job.world(), 2).await?;
    /// for step in 0..10 {
    ///     let give = vec![step; 2 * job.size()];
    ///     let mut take = vec![0; give.len()];
    ///     exchange.run(&give, &mut take).await?;
    ///     assert_eq!(take, give);
    /// }
    /// # job.leave().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn all_to_all<T: Datum>(
        &self,
        group: &Group,
        len: usize,
    ) -> Result<PersistentAllToAll<T>, PersistentError> {
        let call = |bytes| PersistentCall { kind: PersistentKind::AllToAll, root: 0, bytes };
        let core = self.make(group, bytes_of::<T>(len).map(call), 0).await?;
        let (members, me) = (group.members().into(), group.rank());
        Ok(PersistentAllToAll { core, members, me, len, values: std::marker::PhantomData })
    }

    async fn prepare_exchange(&self, group: &Group, key: Key, bytes: usize) -> Result<Core, PersistentError> {
        let (members, me) = (group.members(), group.rank());
        let all = bytes_of::<u8>(bytes.saturating_mul(members.len()))?;
        let data = self.region(all).await?;
        self.enter(key, Inbox::of_all(members, members[me], bytes)?);
        // From here on, dropping it takes it from the board.
        let mut core = Core::new(self, key, data, Tree::default());
        core.others = (1..members.len()).map(|step| members[(me + step) % members.len()]).collect();
        let info = info_of(key, Kind::Part, 0);
        if members.len() > 1 {
            let section = record_apart(&self.handle, |r| {
                members.iter().enumerate().filter(|(place, _)| *place != me).try_for_each(|(place, rank)| {
                    let part = core.data.slice(place * bytes..(place + 1) * bytes);
                    r.send_with_info(&self.message, *rank, &info, part)
                })
            });
            core.down = Some(section.await?);
        }
        Ok(core)
    }

    async fn region(&self, len: usize) -> Result<Region, PersistentError> {
        Ok(Region::allocate(&self.client, len.max(1)).await.map_err(PatternError::from)?)
    }

    /// Takes what comes for a persistent collective.
    fn enter(&self, key: Key, inbox: Inbox) {
        lock(&self.board).inboxes.insert(key, inbox);
    }

    /// One at a time of a group: the members meet, prepare, and meet again, since nobody may send before all can receive.
    async fn make(
        &self,
        group: &Group,
        call: Result<PersistentCall, Fault>,
        mark: u32,
    ) -> Result<Core, PersistentError> {
        let making = group.inner().hub.making(group.inner().at);
        let _turn = making.turn.lock().await;
        lock(&self.board).makes_one_of(group.id(), &making);
        let name = making.meet(group, call.ok().map(|call| (call, mark))).await?;
        let prepared = self.prepare(group, (group.id(), name), call?).await;
        let ready = all_ready(group, prepared.is_ok()).await;
        let mut core = prepared?;
        ready?;
        core.is_made();
        Ok(core)
    }

    async fn prepare(&self, group: &Group, key: Key, call: PersistentCall) -> Result<Core, PersistentError> {
        match call.kind {
            PersistentKind::AllToAll => self.prepare_exchange(group, key, call.bytes).await,
            _ => self.prepare_tree(group, key, call).await,
        }
    }

    async fn prepare_tree(
        &self,
        group: &Group,
        key: Key,
        call: PersistentCall,
    ) -> Result<Core, PersistentError> {
        let PersistentCall { kind, root, bytes: len } = call;
        let one_way = kind == PersistentKind::Broadcast;
        let tree = Tree::new(group.members(), group.rank(), root);
        let data = self.region(len).await?;
        self.enter(key, Inbox::new(tree.clone(), group.members(), len)?);
        let mut core = Core::new(self, key, data, tree);
        let (message, data, handle) = (&self.message, &core.data, &self.handle);
        if let Some((parent, child)) = core.tree.parent {
            let (kind, len) = if one_way { (Kind::Taken, 0) } else { (Kind::Up, len) };
            let info = info_of(key, kind, child);
            let section =
                record_apart(handle, |r| r.send_with_info(message, parent, &info, data.slice(0..len)))
                    .await?;
            *(if one_way { &mut core.taken } else { &mut core.up }) = Some(section);
        }
        if !core.tree.children.is_empty() {
            let section = record_apart(handle, |r| {
                let mut children = core.tree.children.iter();
                let info = info_of(key, Kind::Down, 0);
                children.try_for_each(|child| r.send_with_info(message, *child, &info, data.slice(0..len)))
            });
            core.down = Some(section.await?);
        }
        Ok(core)
    }
}

fn check(what: &'static str, len: usize, expected: usize) -> Result<(), PersistentError> {
    if len == expected {
        return Ok(());
    }
    Err(CollectiveError::Length { what, len, expected }.into())
}

/// A recorded reduction to all members; see [`Persistent::all_reduce`]. All members use it equally often, and drop it after
/// that; whoever uses it more often than one that has dropped it gets [`Fault::GroupLeft`].
#[derive(Debug)]
pub struct PersistentAllReduce<T: Datum> {
    core: Core,
    operation: Reduce<T>,
    len: usize,
}

impl<T: Datum> PersistentAllReduce<T> {
    /// Contributes these values, and replaces them by the result, which is the same on all members.
    ///
    /// # Errors
    /// If they are not as many as it was made for; then nothing was done. If a rank is lost or has left, has dropped it, has no
    /// memory, or its reduction panics: it ends on all members, and so do all later uses.
    ///
    /// # Cancel safety
    /// Not cancel safe: dropped amid, it ends on all members with [`Fault::GroupLeft`] of this one.
    pub async fn run(&mut self, values: &mut [T]) -> Result<(), PersistentError> {
        check("the contribution", values.len(), self.len)?;
        let combiner = self.operation.combiner();
        let mut own = values.as_bytes().to_vec();
        let amid = Use(&mut self.core);
        let outcome = amid.0.reduce(&mut own, |target, other| combiner.run(target, other, false)).await;
        amid.0.ended(outcome).await?;
        fill(values, &own);
        Ok(())
    }
}

/// A recorded broadcast; see [`Persistent::broadcast`]. All members use it equally often, and drop it after that, as
/// [`PersistentAllReduce`]; what is sent to a member that has dropped it may be told one use later.
#[derive(Debug)]
pub struct PersistentBroadcast<T: Datum> {
    core: Core,
    len: usize,
    values: std::marker::PhantomData<fn(T)>,
}

impl<T: Datum> PersistentBroadcast<T> {
    /// The root gives these values, all others get them there.
    ///
    /// # Errors
    /// As for [`PersistentAllReduce::run`].
    ///
    /// # Cancel safety
    /// Not cancel safe, as [`PersistentAllReduce::run`].
    pub async fn run(&mut self, values: &mut [T]) -> Result<(), PersistentError> {
        check("the broadcast", values.len(), self.len)?;
        let mut own = values.as_bytes().to_vec();
        let amid = Use(&mut self.core);
        let outcome = amid.0.broadcast(&mut own).await;
        amid.0.ended(outcome).await?;
        fill(values, &own);
        Ok(())
    }
}

/// A recorded exchange between all members; see [`Persistent::all_to_all`]. All members use it equally often, and drop it
/// after that, as [`PersistentAllReduce`].
#[derive(Debug)]
pub struct PersistentAllToAll<T: Datum> {
    core: Core,
    members: Box<[Rank]>,
    me: usize,
    len: usize,
    values: std::marker::PhantomData<fn(T)>,
}

impl<T: Datum> PersistentAllToAll<T> {
    /// Gives each member its part of `give`, by rank in the group, and takes the parts of all into `take`.
    ///
    /// # Errors
    /// As for [`PersistentAllReduce::run`]. Parts of `take` may have been written by then.
    ///
    /// # Cancel safety
    /// Not cancel safe, as [`PersistentAllReduce::run`].
    pub async fn run(&mut self, give: &[T], take: &mut [T]) -> Result<(), PersistentError> {
        let (len, me) = (self.len, self.me);
        check("what is given", give.len(), len * self.members.len())?;
        check("what is taken", take.len(), len * self.members.len())?;
        let places: HashMap<Rank, usize> = self.members.iter().copied().zip(0..).collect();
        take[me * len..][..len].copy_from_slice(&give[me * len..][..len]);
        let amid = Use(&mut self.core);
        let outcome = amid.0.exchange(give.as_bytes(), |rank, part| {
            if let Some(place) = places.get(&rank) {
                fill(&mut take[place * len..][..len], part);
            }
        });
        let outcome = outcome.await;
        amid.0.ended(outcome).await
    }
}

fn fill<T: Datum>(values: &mut [T], bytes: &[u8]) {
    for (value, bytes) in values.iter_mut().zip(bytes.chunks_exact(size_of::<T>().max(1))) {
        if let Ok(new) = T::read_from_bytes(bytes) {
            *value = new;
        }
    }
}

/// A recorded barrier; see [`Persistent::barrier`]. All members use it equally often, and drop it after that, as
/// [`PersistentAllReduce`].
#[derive(Debug)]
pub struct PersistentBarrier {
    core: Core,
}

impl PersistentBarrier {
    /// Waits until all members are here.
    ///
    /// # Errors
    /// As for [`PersistentAllReduce::run`].
    ///
    /// # Cancel safety
    /// Not cancel safe, as [`PersistentAllReduce::run`].
    pub async fn run(&mut self) -> Result<(), PersistentError> {
        let amid = Use(&mut self.core);
        let outcome = amid.0.reduce(&mut [], |_, _| {}).await;
        amid.0.ended(outcome).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tree_reaches_all_and_its_edges_agree() {
        for size in 1..40usize {
            let members: Vec<Rank> = (0..size as u32).map(|rank| Rank(rank * 3)).collect();
            for root in [0, size / 2, size - 1] {
                let trees: Vec<Tree> = (0..size).map(|me| Tree::new(&members, me, root)).collect();
                assert!(trees[root].parent.is_none());
                let mut edges = 0;
                for (me, tree) in trees.iter().enumerate() {
                    for (number, child) in tree.children.iter().enumerate() {
                        let theirs = &trees[child.index() / 3];
                        assert_eq!(theirs.parent, Some((members[me], number as u8)), "{size} from {root}");
                        edges += 1;
                    }
                }
                assert_eq!(edges, size - 1);
            }
        }
    }
}
