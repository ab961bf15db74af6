//! Windows of groups.

use super::allocation::allocate_part;
use super::memory::Made;
use super::{Element, Origin, Window, check_part};
use crate::collective::CollectiveError;
use crate::datatype::LayoutAccess;
use crate::exchange::{Exchange, Key};
use crate::group::{Group, Inner};
use futures::future::join_all;
use posthaste_core::device::{Allocation, Memory, RemoteMemory};
use posthaste_core::engine::Gates;
use posthaste_core::memory::SharedSlice;
use posthaste_core::route::RouteMemory;
use posthaste_core::{Client, Device, Fault, Handle, Rank, RmaError, SendError, WindowId};
use std::marker::PhantomData;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Memory of this rank, and the device that takes it back.
type Owned = (Arc<dyn Device>, Allocation);

/// What windows of groups are made of.
pub(crate) struct WindowHome {
    device: Arc<dyn Device>,
    memory: RouteMemory,
    gates: posthaste_core::sync::Arc<Gates>,
    exchange: Exchange,
    layouts: LayoutAccess,
}

impl std::fmt::Debug for WindowHome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WindowHome")
    }
}

impl WindowHome {
    /// `None`: the client has no context, or no device reaches this rank itself.
    pub fn new(client: &Client, exchange: &Exchange, layouts: &LayoutAccess) -> Option<WindowHome> {
        let me = super::first_context(client).ok()?.me().rank;
        let device = client.device_for(me)?.clone();
        let (exchange, layouts, memory) = (exchange.clone(), *layouts, client.memory(me));
        Some(WindowHome { device, memory, gates: client.gates().clone(), exchange, layouts })
    }
}

impl WindowHome {
    /// Memory of this rank that others can reach, and how it is given back; `None` if there is none.
    pub fn lend(&self, len: u64) -> Option<(Owned, SharedSlice)> {
        let allocation = match self.device.allocate(len) {
            Ok(allocation) => allocation,
            Err(error) => {
                tracing::debug!(%error, "no memory for a group's board");
                return None;
            }
        };
        match self.map(self.exchange.rank(), allocation.offset, len) {
            Some(memory) => Some(((self.device.clone(), allocation), memory)),
            None => {
                self.device.free(allocation);
                None
            }
        }
    }

    /// Memory of a rank as mapped here.
    pub fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        self.memory.map(rank, offset, len)
    }

    /// Has others' memory in its custody.
    pub fn exchange(&self) -> &Exchange {
        &self.exchange
    }
}

/// What a member tells of its part.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Share {
    /// The number of the new group if this member leads it.
    id: u64,
    offset: u64,
    len: u64,
    /// 1: it has got no memory.
    failed: u64,
}

/// How a window of a group was made.
pub(super) struct GroupOrigin {
    home: Arc<WindowHome>,
    key: Key,
    group: Group,
    others: Vec<Rank>,
}

impl GroupOrigin {
    /// Waits until what this rank did towards the members, itself among them, has taken effect; whoever is no member is not
    /// waited for.
    pub async fn flush(&self, handle: &Handle) -> Result<(), SendError> {
        let members = self.group.members().iter();
        let ended = join_all(members.map(|rank| crate::flush::flush(handle, *rank))).await;
        ended.into_iter().find(|ended| !is_loss(ended)).unwrap_or(Ok(()))
    }

    pub async fn release(&self) -> Result<(), RmaError> {
        Ok(self.home.exchange.let_go_together(self.key, &self.others).await?)
    }
}

/// Whether that is well, or only says that a member is gone, whose operations have ended, too.
fn is_loss(ended: &Result<(), SendError>) -> bool {
    match ended {
        Ok(()) => true,
        Err(SendError::Fault(fault)) => fault.peer().is_some(),
        Err(_) => false,
    }
}

/// A window that is being made. Dropped before it is made, it counts as released by this rank.
struct Making<'g> {
    home: &'g Arc<WindowHome>,
    group: &'g Inner,
    key: Key,
    others: Vec<Rank>,
    made: bool,
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if !self.made {
            // Whoever was started again since has taken no part.
            self.home.exchange.lose(self.key, &self.group.hub.gone_from(self.group.at));
            self.home.exchange.let_go(self.key, &self.others);
        }
    }
}

fn collective_to_rma(error: CollectiveError) -> RmaError {
    match error {
        CollectiveError::Fault(fault) => fault.into(),
        CollectiveError::TooManyGroups => {
            Fault::OutOfMemory("this rank has as many groups as it may have").into()
        }
        refused => RmaError::Refused(refused.to_string()),
    }
}

impl Group {
    /// Makes a new group of the same members that owns one window: collective, every member names its own length in
    /// elements, 0 for access only. The memory is zero. In the window, ranks are those of the group: `Rank(0)` is its first
    /// member.
    ///
    /// # Errors
    /// If memory cannot be had here (the other members then get [`Fault::OutOfMemory`]), or the operation fails as any of the
    /// group does. Where a member is lost meanwhile, some survivors may have the window and others not.
    ///
    /// # Cancel safety
    /// Not cancel safe: the others may have the window, with a part of this rank that is taken until they free it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let group = job.world();
    /// let window = group.shmalloc::<u32>(10).await?;
    /// let first = posthaste::Rank(0); // of the group
    /// window.put(first, 3, 7).await?;
    /// assert_eq!(window.fetch_add(first, 3, 1).await?, 7);
    /// assert_eq!(window.group().map(|group| group.size()), Some(1));
    /// window.free().await?;
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn shmalloc<T: Element>(&self, len: usize) -> Result<Window<T>, RmaError> {
        const { assert!(size_of::<T>() > 0, "a window has elements of at least one byte") };
        let inner = self.inner();
        let me = inner.handle.me().rank;
        let home = inner.windows.as_ref().ok_or(RmaError::Unreachable(me))?;
        // What is not begun need not be ended, which takes as long as somebody who was cut off lives.
        if let Some(fault) = inner.hub.failure_of_next(inner.at) {
            return Err(fault.into());
        }
        let bytes = (len as u64).checked_mul(size_of::<T>() as u64);
        let own = allocate_part(&home.device, bytes);
        // Of those that take part: whichever is started again meanwhile has no part.
        let incarnations: Vec<u32> =
            self.members().iter().map(|rank| home.gates.incarnation_of(*rank)).collect();
        let id = inner.hub.new_id();
        let (share, own, failed) = match own {
            Ok((own, start)) => {
                let share = Share { id, offset: start, len: bytes.unwrap_or(0), failed: 0 };
                (share, (own.len > 0).then(|| (home.device.clone(), own)), None)
            }
            Err(error) => (Share { id, offset: 0, len: 0, failed: 1 }, None, Some(error)),
        };
        let naming = home.exchange.name_window(self.id());
        let (number, gathered) = self.numbered_all_gather(&[share]);
        if number == u64::MAX {
            // Nothing was begun, and nobody has heard of this part.
            if let Some((device, own)) = own {
                device.free(own);
            }
            return Err(gathered.await.map_or_else(collective_to_rma, |_| Fault::Shutdown.into()));
        }
        let key = (self.id(), number);
        let others: Vec<Rank> = self.members().iter().copied().filter(|rank| *rank != me).collect();
        home.exchange.hold(key, others.clone(), own);
        drop(naming);
        let mut making = Making { home, group: inner, key, others: others.clone(), made: false };
        let gathered = gathered.await;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let gathered = gathered.map_err(collective_to_rma)?;
        if gathered.iter().any(|share| share.failed != 0) {
            return Err(Fault::OutOfMemory("another member could not allocate its part of the window").into());
        }
        for (rank, share) in self.members().iter().zip(&gathered) {
            check_part(*rank, share.offset, share.len)?;
        }
        let group = self.twin(gathered[0].id, number).map_err(collective_to_rma)?;
        let parts = self.members().iter().zip(&gathered).zip(incarnations);
        let remotes = parts.map(|((rank, share), incarnation)| {
            let (rank, Share { offset, len, .. }) = (*rank, *share);
            RemoteMemory { rank, offset, len, mapped: home.memory.map(rank, offset, len), incarnation }
        });
        let made = Made {
            id: WindowId(number as u32),
            handle: inner.handle.clone(),
            gates: home.gates.clone(),
            device: home.device.clone(),
            layouts: home.layouts,
            size: gathered.len() as u32,
            own: self.rank(),
        };
        let memory = made.with(remotes.collect()).await;
        making.made = true;
        let origin = GroupOrigin { home: home.clone(), key, group, others };
        Ok(Window { memory, origin: Origin::Group(Arc::new(origin)), element: PhantomData })
    }
}

impl<T> Window<T> {
    /// The group that owns the window: a new one, with the members of that in which it was made. `None` for a window of all
    /// ranks that the job made.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (of_all, of_group) = (job.shmalloc::<u8>(8).await?, job.world().shmalloc::<u8>(8).await?);
    /// assert!(of_all.group().is_none());
    /// let owner = of_group.group().expect("a group made it");
    /// assert_eq!(owner.members(), job.world().members());
    /// owner.barrier().await?; // it is a group like any other
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn group(&self) -> Option<&Group> {
        match &self.origin {
            Origin::World(..) => None,
            Origin::Group(origin) => Some(&origin.group),
        }
    }

    /// The rank in the window of a rank of the job: that by which puts and gets name it.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let group = job.world();
    /// let window = group.shmalloc::<u64>(1).await?;
    /// // In the window of a group, ranks are those of the group.
    /// let here = window.rank_of(job.rank()).expect("this rank is a member");
    /// window.put(here, 0, 5).await?;
    /// assert_eq!((here.index(), window.load(0)), (group.rank(), Some(5)));
    /// # job.leave().await
    /// # }
    /// ```
    #[must_use]
    pub fn rank_of(&self, rank: Rank) -> Option<Rank> {
        match &self.origin {
            Origin::World(..) => (rank.0 < self.memory.size).then_some(rank),
            Origin::Group(origin) => origin.group.from_job(rank).map(|rank| Rank(rank as u32)),
        }
    }
}
