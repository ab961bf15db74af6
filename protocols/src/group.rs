//! Groups: which ranks take part in a collective operation.
//!
//! A group is known by a number that no other group of the job has or had: its first member's rank and incarnation, and a
//! count of the groups that this one has named. Splitting agrees on that in the same messages that tell colours and keys. Where
//! members are listed, the first of them tells the others.

use crate::collective::{
    Algorithm, BadMembers, Choice, CollectiveError, Datum, Executor, GroupBoard, Hub, Kind, MOST_NEAR,
    Membership, Origin, check_members,
};
use crate::datatype::LayoutAccess;
use crate::exchange::Exchange;
use crate::window::WindowHome;
use posthaste_core::context::poll_until;
use posthaste_core::{Client, Fault, Handle, Messager, Rank, RegisterError};
use std::sync::{Arc, OnceLock};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The collective operations of a client: makes groups. Cheap to clone.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// // A group of listed ranks, in the order of the list.
/// let mine = job.collectives().subset(&[job.rank()]).await?;
/// assert_eq!((mine.rank(), mine.size()), (0, 1));
/// assert_eq!(mine.members(), [job.rank()]);
/// mine.barrier().await?;
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Collectives {
    hub: Arc<Hub>,
    handle: Handle,
    windows: Option<Arc<WindowHome>>,
}

/// A group in the hands of its user.
#[derive(Debug)]
pub(crate) struct Inner {
    pub hub: Arc<Hub>,
    pub handle: Handle,
    pub at: usize,
    membership: Arc<Membership>,
    hosts: Hosts,
    /// What windows of the group are made of.
    pub windows: Option<Arc<WindowHome>>,
    /// All members share memory, and small operations are done there.
    pub near: bool,
    /// Where, from the first of them on.
    pub boards: OnceLock<Arc<GroupBoard>>,
}

impl Inner {
    /// Number of members.
    pub fn size(&self) -> usize {
        self.membership.size()
    }

    /// The rank in the job of a member.
    pub fn rank_of(&self, place: usize) -> Option<Rank> {
        self.membership.members.get(place).copied()
    }
}

/// How the members are laid out on hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hosts {
    One,
    /// No two members on one.
    Spread,
    Shared,
}

impl Hosts {
    fn of(nodes: &[u32]) -> Hosts {
        let mut sorted = nodes.to_vec();
        sorted.sort_unstable();
        match sorted.first() == sorted.last() {
            true => Hosts::One,
            false if sorted.windows(2).any(|pair| pair[0] == pair[1]) => Hosts::Shared,
            false => Hosts::Spread,
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The world stays.
        if self.at != 0 {
            tracing::debug!(me = %self.handle.me(), group = self.at, "group dropped");
            self.hub.abandon(&self.handle, self.at);
        }
    }
}

/// Some ranks of the job, in an order of their own, that call collective operations together. Cheap to clone; it ends when
/// its last clone is dropped and its operations have ended.
///
/// Groups may overlap in any way, and operations of several may be under way at once.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> posthaste::Result<()> {
/// let job = posthaste::solo().await?;
/// let world = job.world();
/// // Two teams, by odd and even rank; in each, the ranks keep their order.
/// let color = world.rank() as u32 % 2;
/// let team = world.split(Some(color), 0).await?.expect("every rank has a colour");
/// let members = team.all_gather(&[world.rank() as u64]).await?;
/// assert_eq!(members.len(), team.size());
/// assert!(members.iter().all(|rank| *rank as u32 % 2 == color));
/// // A rank has a number in the job and one in each of its groups.
/// assert_eq!(team.to_job(team.rank()), Some(job.rank()));
/// assert_eq!(team.translate(team.rank(), &world), Some(world.rank()));
/// # job.leave().await
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Group {
    inner: Arc<Inner>,
    choice: Option<Choice>,
    executor: Option<Arc<dyn Executor>>,
}

/// What a member says when a group is split.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Share {
    color: u32,
    stays: u32,
    key: u32,
    rank: u32,
    id: u64,
}

impl Collectives {
    /// Registers the collective operations with a client; once per client, before it is opened. `nodes`: the host of each
    /// rank.
    ///
    /// # Errors
    /// If they are registered already.
    pub fn new(messager: &dyn Messager, nodes: &[u32]) -> Result<Collectives, RegisterError> {
        let handle = messager.contexts().first().cloned().ok_or(RegisterError::Closed)?;
        Ok(Collectives { hub: Hub::new(messager, nodes)?, handle, windows: None })
    }

    /// The same with windows: groups can [`shmalloc`](Group::shmalloc).
    ///
    /// # Errors
    /// If the client has no context, or no device reaches this rank itself.
    pub fn with_windows(
        self,
        client: &Client,
        exchange: &Exchange,
        layouts: &LayoutAccess,
    ) -> Result<Collectives, RegisterError> {
        let home = WindowHome::new(client, exchange, layouts).ok_or(RegisterError::Closed)?;
        let home = Arc::new(home);
        self.hub.set_home(&home);
        let hub = Arc::downgrade(&self.hub);
        exchange.set_never(move |key| hub.upgrade().is_some_and(|hub| hub.never_makes(key)));
        let windows = Some(home);
        Ok(Collectives { windows, ..self })
    }

    /// Sets how many bytes of this rank's memory that others reach its stages may take, for each group: where members that
    /// share memory lay what they give to each other. 0: none, and what has no room on a board goes as messages. 32 MiB
    /// unless this is called. A group keeps what it has.
    #[must_use]
    pub fn with_stage_bytes(self, bytes: u64) -> Collectives {
        self.hub.set_stage_bytes(bytes);
        self
    }

    /// This rank was started again, and what the others call their world has another incarnation of it: all operations of
    /// its own world end with that error.
    pub fn outlive(&self, incarnation: u32, cause: Fault) {
        self.hub.outlive(incarnation, cause);
    }

    /// All ranks of the job.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.collectives().world();
    /// assert_eq!(world.size(), job.size());
    /// assert_eq!(world.from_job(job.rank()), Some(world.rank()));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn world(&self) -> Group {
        let (at, membership) = self.hub.world();
        self.group(at, membership)
    }

    /// A group of the listed ranks, in that order. All of them call this, in the same order where two have several in
    /// common; nobody else does.
    ///
    /// # Errors
    /// If the list is none of different ranks with this one among them, or a member is lost or has left.
    ///
    /// # Cancel safety
    /// Cancel safe for all but the first of the list, which founds the group when this is first polled.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let ranks: Vec<_> = job.ranks().filter(|rank| rank.0 % 2 == 0).collect();
    /// // Only ranks of the list call this.
    /// if ranks.contains(&job.rank()) {
    ///     let even = job.collectives().subset(&ranks).await?;
    ///     assert_eq!(even.all_gather(&[job.rank().0]).await?.len(), ranks.len());
    /// }
    /// // A list must have this rank in it, and no rank twice.
    /// assert!(job.collectives().subset(&[]).await.is_err());
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn subset(&self, ranks: &[Rank]) -> Result<Group, CollectiveError> {
        let me = self.handle.me().rank;
        check_members(ranks, me, self.hub.nodes().len())?;
        let founder = *ranks.first().ok_or(BadMembers::Nobody)?;
        let (at, membership) = if founder == me {
            // All hear of ranks that die or leave; whom this rank alone has cut off, they wait with to be offered the group.
            if let Some(fault) = self.hub.obstacle(ranks)
                && !matches!(fault, Fault::PeerCorrupt(_))
            {
                return Err(fault.into());
            }
            let found = self.hub.found(ranks.to_vec(), Origin::Called);
            found.ok_or(CollectiveError::TooManyGroups)?
        } else {
            // What was offered is taken in any case: another call may be for the same ranks.
            self.offer(Some((founder, ranks))).await?
        };
        // Dropped, it breaks for all.
        let group = self.group(at, membership);
        self.hub.obstacle(ranks).map_or(Ok(group), |fault| Err(fault.into()))
    }

    /// A group of the listed ranks that none of the others need know of: they hear of it with the first operation, and
    /// take part when they have got it from [`arrival`](Self::arrival). Nothing is waited for.
    ///
    /// # Errors
    /// If the list is none of different ranks with this one among them, or one of them is lost or has left.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// // The first of the members decides by itself who takes part, and tells it with what it broadcasts.
    /// let group = job.collectives().on_the_fly(&[job.rank()])?;
    /// assert_eq!(group.broadcast(0, &[1.5, 2.5]).await?, [1.5, 2.5]);
    /// // The others would have got the group from `arrival`.
    /// # job.leave().await
    /// # }
    /// ```
    pub fn on_the_fly(&self, ranks: &[Rank]) -> Result<Group, CollectiveError> {
        check_members(ranks, self.handle.me().rank, self.hub.nodes().len())?;
        if let Some(fault) = self.hub.obstacle(ranks) {
            return Err(fault.into());
        }
        let found = self.hub.found(ranks.to_vec(), Origin::OnTheFly);
        let (at, membership) = found.ok_or(CollectiveError::TooManyGroups)?;
        Ok(self.group(at, membership))
    }

    /// The next group that another rank made on the fly with this one among its members.
    ///
    /// # Errors
    /// If the job is left.
    ///
    /// # Cancel safety
    /// Cancel safe: a group that has come is given to the next call.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::join_or_local(2).await?; // two processes go on from here
    /// // Rank 0 decides by itself that there is a group; rank 1 gets it with the first operation.
    /// let group = match job.rank().0 {
    ///     0 => job.collectives().on_the_fly(&[posthaste::Rank(0), posthaste::Rank(1)])?,
    ///     _ => job.collectives().arrival().await?,
    /// };
    /// assert_eq!(group.broadcast(0, &[42 - 42 * group.rank() as u64]).await?, [42]);
    /// group.barrier().await?;
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn arrival(&self) -> Result<Group, CollectiveError> {
        let (at, membership) = self.offer(None).await?;
        Ok(self.group(at, membership))
    }

    async fn offer(
        &self,
        wanted: Option<(Rank, &[Rank])>,
    ) -> Result<(usize, Arc<Membership>), CollectiveError> {
        let Collectives { hub, handle, .. } = self;
        let waits = hub.waits_for_offers();
        let offer = std::future::poll_fn(|cx| {
            poll_until(handle, cx, || hub.take_offer(wanted, &waits), |waker| waits.with(waker))
        });
        Ok(offer.await?)
    }

    fn group(&self, at: usize, membership: Arc<Membership>) -> Group {
        Group::new(&self.hub, &self.handle, &self.windows, at, membership)
    }
}

impl Group {
    fn new(
        hub: &Arc<Hub>,
        handle: &Handle,
        windows: &Option<Arc<WindowHome>>,
        at: usize,
        membership: Arc<Membership>,
    ) -> Group {
        let hosts = Hosts::of(&membership.nodes);
        let near = hosts == Hosts::One
            && (2..=MOST_NEAR).contains(&membership.size())
            && windows.is_some()
            && hub.are_first_incarnations(&membership.members);
        let (hub, handle, windows) = (hub.clone(), handle.clone(), windows.clone());
        tracing::debug!(me = %handle.me(), group = at, members = membership.size(), near, "group made");
        Group {
            inner: Arc::new(Inner {
                hub,
                handle,
                at,
                membership,
                hosts,
                windows,
                near,
                boards: OnceLock::new(),
            }),
            choice: None,
            executor: None,
        }
    }

    /// A group with the same members, in the same order, that all of them add after an operation which told them its
    /// number.
    pub(crate) fn twin(&self, id: u64, made: u64) -> Result<Group, CollectiveError> {
        let Inner { hub, handle, windows, .. } = &*self.inner;
        let added = hub.add(id, self.members().to_vec(), Some((self.id(), made)));
        let (at, membership) = added.ok_or(CollectiveError::TooManyGroups)?;
        Ok(Group::new(hub, handle, windows, at, membership))
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    pub(crate) fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    pub(crate) fn with_choice(&self, choice: Choice) -> Group {
        Group { choice: Some(choice), ..self.clone() }
    }

    pub(crate) fn executor(&self) -> Option<&Arc<dyn Executor>> {
        self.executor.as_ref()
    }

    pub(crate) fn with_executor(&self, executor: Arc<dyn Executor>) -> Group {
        Group { executor: Some(executor), ..self.clone() }
    }

    /// Whether the library chooses how operations are done.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.choice.is_none() && self.executor.is_none()
    }

    /// The library's own choice for an operation.
    pub(crate) fn best(&self, kind: Kind, bytes: usize) -> Algorithm {
        let hosts = self.inner.hosts;
        Algorithm::best(kind, bytes, self.size(), hosts == Hosts::One, hosts == Hosts::Shared)
    }

    /// This rank's place in the group.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.membership.me
    }

    /// Number of members; at least 1.
    #[must_use]
    pub fn size(&self) -> usize {
        self.inner.membership.size()
    }

    /// The group's number, which is the same on all members and which no other group of the job has or had.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.membership.id
    }

    /// The members, by their rank in the group.
    #[must_use]
    pub fn members(&self) -> &[Rank] {
        &self.inner.membership.members
    }

    /// The rank in the job of a rank of the group.
    #[must_use]
    pub fn to_job(&self, rank: usize) -> Option<Rank> {
        self.members().get(rank).copied()
    }

    /// The rank in the group of a rank of the job.
    #[must_use]
    pub fn from_job(&self, rank: Rank) -> Option<usize> {
        self.inner.membership.place_of(rank)
    }

    /// The rank in another group of a rank of this one.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// let pair = world.subset(&[0]).await?;
    /// // Who is rank 0 of the pair, as the world counts?
    /// assert_eq!(pair.translate(0, &world), Some(0));
    /// assert_eq!(pair.translate(1, &world), None);
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn translate(&self, rank: usize, other: &Group) -> Option<usize> {
        other.from_job(self.to_job(rank)?)
    }

    fn collectives(&self) -> Collectives {
        let Inner { hub, handle, windows, .. } = &*self.inner;
        Collectives { hub: hub.clone(), handle: handle.clone(), windows: windows.clone() }
    }

    /// A group of some ranks of this one, in that order; as [`Collectives::subset`].
    ///
    /// # Errors
    /// As for [`Collectives::subset`].
    ///
    /// # Cancel safety
    /// As for [`Collectives::subset`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// // The same ranks in reverse order: the last one becomes rank 0.
    /// let reversed: Vec<usize> = (0..world.size()).rev().collect();
    /// let group = world.subset(&reversed).await?;
    /// assert_eq!(group.rank(), world.size() - 1 - world.rank());
    /// assert!(world.subset(&[world.size()]).await.is_err(), "no such rank");
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn subset(&self, ranks: &[usize]) -> Result<Group, CollectiveError> {
        let size = self.size();
        let to_job =
            |rank: &usize| self.to_job(*rank).ok_or(CollectiveError::UnknownRank { rank: *rank, size });
        let ranks = ranks.iter().map(to_job).collect::<Result<Vec<Rank>, _>>()?;
        self.collectives().subset(&ranks).await
    }

    /// A group of the members of this one and, behind them, those of the others that are not in it. The members of this
    /// group call this; the others, who do not have it, name the whole list with [`Collectives::subset`].
    ///
    /// # Errors
    /// As for [`Collectives::subset`].
    ///
    /// # Cancel safety
    /// As for [`Collectives::subset`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let group = job.collectives().subset(&[job.rank()]).await?;
    /// // Ranks that are members already are not added again.
    /// let larger = group.union(&[job.rank()]).await?;
    /// assert_eq!(larger.members(), group.members());
    /// assert_ne!(larger.id(), group.id());
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn union(&self, others: &[Rank]) -> Result<Group, CollectiveError> {
        let mut ranks = self.members().to_vec();
        ranks.extend(others.iter().filter(|rank| self.from_job(**rank).is_none()));
        self.collectives().subset(&ranks).await
    }

    /// Splits the group: members that name the same colour are together in a new group, ordered by key and, where that is
    /// equal, by rank. A member without a colour is in none. Collective.
    ///
    /// # Errors
    /// As for every operation of the group.
    ///
    /// # Cancel safety
    /// Not cancel safe: the others have a group of which this rank is a member.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let world = job.world();
    /// // The rows of a grid of processes; the key keeps their columns in order.
    /// let columns = 4;
    /// let (row, column) = (world.rank() / columns, world.rank() % columns);
    /// let same_row = world.split(Some(row as u32), column as u32).await?.expect("a colour was given");
    /// assert_eq!(same_row.rank(), column);
    /// // A rank without a colour takes part in the call, and is in no group.
    /// assert!(world.split(None, 0).await?.is_none());
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Group>, CollectiveError> {
        let hub = &self.inner.hub;
        let me = self.inner.handle.me().rank;
        let share = Share {
            color: color.unwrap_or(0),
            stays: color.is_some().into(),
            key,
            rank: me.0,
            id: hub.new_id(),
        };
        let (made, shares) = self.numbered_all_gather(&[share]);
        let mut shares = shares.await?;
        // Each tells of itself: another one's name is not to be made a member twice.
        let mut told = shares.iter().zip(self.members());
        if let Some((_, member)) = told.find(|(share, member)| share.rank != member.0) {
            return Err(Fault::PeerCorrupt(*member).into());
        }
        let Some(color) = color else { return Ok(None) };
        shares.retain(|share| share.stays == 1 && share.color == color);
        // The order of the group is kept among equal keys.
        shares.sort_by_key(|share| share.key);
        let id = shares.first().map_or(0, |share| share.id);
        let members = shares.iter().map(|share| Rank(share.rank)).collect();
        let added = hub.add(id, members, Some((self.id(), made)));
        let (at, membership) = added.ok_or(CollectiveError::TooManyGroups)?;
        Ok(Some(Group::new(hub, &self.inner.handle, &self.inner.windows, at, membership)))
    }

    /// Splits the group by nodes: the members whose memory this one shares, in the order of the group (what MPI calls
    /// `MPI_Comm_split_type` with `MPI_COMM_TYPE_SHARED`). Collective.
    ///
    /// # Errors
    /// As for every operation of the group.
    ///
    /// # Cancel safety
    /// As for [`split`](Self::split).
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::Reduce;
    /// let world = job.world();
    /// // Sums on each host, and then over one rank of each.
    /// let host = world.split_by_node().await?;
    /// let sum = host.all_reduce_one(1_u64, &Reduce::sum()).await?;
    /// let heads = world.split((host.rank() == 0).then_some(0), 0).await?;
    /// if let Some(heads) = heads {
    ///     assert_eq!(heads.all_reduce_one(sum, &Reduce::sum()).await?, job.size() as u64);
    /// }
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn split_by_node(&self) -> Result<Group, CollectiveError> {
        let Membership { nodes, me, .. } = &*self.inner.membership;
        // A colour was given, so there is a group.
        self.split(Some(nodes[*me]), 0).await?.ok_or_else(|| Fault::Shutdown.into())
    }
}

const _: fn() = || {
    fn is_datum<T: Datum>() {}
    is_datum::<Share>();
};
