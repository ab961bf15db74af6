//! The vocabulary: who talks to whom, about what. All of them are plain numbers with a type.

use serde::{Deserialize, Serialize};
use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($int:ty), $word:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, FromBytes, IntoBytes, Immutable,
            KnownLayout,
        )]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(pub $int);

        impl $name {
            /// The number as an index.
            #[inline]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A process of the job, counted from 0 (a *task* in PAMI's words). Displays as its bare number.
    Rank(u32),
    ""
);
id!(
    /// One of the independent progress engines of a client; the number of contexts is fixed by the job.
    ContextId(u16),
    "context "
);
id!(
    /// One of the application-level entities that share a process without seeing each other's traffic.
    ClientId(u16),
    "client "
);
id!(
    /// What a rank calls a registered protocol; ranks need not agree on the number, only on the name.
    ProtocolId(u16),
    "protocol "
);
id!(
    /// A registered control, as all ranks know it: it follows from the name.
    ControlId(u64),
    "control "
);
id!(
    /// A window made by a collective `shmalloc`; all members agree on the number.
    WindowId(u32),
    "window "
);
id!(
    /// A registered region of a rank's memory.
    RegionId(u32),
    "region "
);
id!(
    /// A stream of a pair of ranks, told apart from other streams of the same pair.
    ConnectionId(u32),
    "connection "
);
/// A recorded pattern ("persistent id"). An id whose pattern was unregistered never names another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PatternId {
    section: u32,
    generation: u32,
}

impl PatternId {
    pub(crate) const fn new(section: u32, generation: u32) -> Self {
        Self { section, generation }
    }

    /// Its section among those of its context.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.section as usize
    }

    pub(crate) const fn generation(self) -> u32 {
        self.generation
    }
}

impl fmt::Display for PatternId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pattern {}", self.section)
    }
}

impl Rank {
    /// The next rank of a ring of `size` ranks.
    ///
    /// # Panics
    /// If `size` is 0.
    ///
    /// ```
    /// use posthaste_core::Rank;
    /// assert_eq!(Rank(3).next(4), Rank(0));
    /// ```
    #[must_use]
    pub const fn next(self, size: usize) -> Rank {
        Rank(((self.0 as usize + 1) % size) as u32)
    }

    /// The previous rank of a ring of `size` ranks.
    ///
    /// # Panics
    /// If `size` is 0.
    ///
    /// # Examples
    /// ```
    /// use posthaste_core::Rank;
    /// assert_eq!(Rank(0).previous(4), Rank(3));
    /// assert_eq!(Rank(3).next(4).previous(4), Rank(3));
    /// ```
    #[must_use]
    pub const fn previous(self, size: usize) -> Rank {
        Rank(((self.0 as usize + size - 1) % size) as u32)
    }
}

/// Where a message goes to or comes from: a context of a rank. The client is that of the messager.
///
/// # Examples
/// ```
/// use posthaste_core::{ContextId, Endpoint, Rank};
///
/// let there = Endpoint::new(Rank(3), ContextId(1));
/// assert_eq!(there.to_string(), "rank 3 context 1");
/// assert_ne!(there, Endpoint { context: ContextId(0), ..there });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// The process.
    pub rank: Rank,
    /// The context within the client.
    pub context: ContextId,
}

impl Endpoint {
    /// An endpoint from its two parts.
    #[must_use]
    pub const fn new(rank: Rank, context: ContextId) -> Self {
        Self { rank, context }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, self.context)
    }
}

/// What a job consists of; the same on every rank.
///
/// # Examples
/// ```
/// use posthaste_core::{ContextId, Endpoint, JobShape, Rank};
///
/// let shape = JobShape { ranks: 4, clients: 1, contexts: 2 };
/// let last = Endpoint::new(Rank(3), ContextId(1));
/// assert_eq!((shape.endpoints(), shape.index(last)), (8, 7));
/// assert_eq!(shape.endpoint(7), last);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobShape {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of clients per rank.
    pub clients: u16,
    /// Number of contexts per client.
    pub contexts: u16,
}

impl JobShape {
    /// Endpoints of one client: ranks times contexts.
    #[must_use]
    pub const fn endpoints(&self) -> usize {
        self.ranks as usize * self.contexts as usize
    }

    /// The index of an endpoint among those of its client.
    #[inline]
    #[must_use]
    pub const fn index(&self, endpoint: Endpoint) -> usize {
        endpoint.rank.0 as usize * self.contexts as usize + endpoint.context.0 as usize
    }

    /// The endpoint with that index.
    #[inline]
    #[must_use]
    pub const fn endpoint(&self, index: usize) -> Endpoint {
        Endpoint {
            rank: Rank((index / self.contexts as usize) as u32),
            context: ContextId((index % self.contexts as usize) as u16),
        }
    }
}
