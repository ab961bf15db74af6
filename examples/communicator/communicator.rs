//! Communicators in the manner of MPI: messages are matched by source and tag.
//!
//! This is the *language adaptor*, the uppermost layer over the collective operations: names and conventions, and the
//! matching of messages, which the library itself leaves out. All else is a line or two over a [`Group`].

use posthaste::collective::{Arithmetic, Datum};
use posthaste::{
    ActiveMessage, CollectiveError, Counter, Fault, Group, Job, Message, OwnedMessage, Rank, Reduce,
    RegisterError, SendError,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use zerocopy::{FromBytes, IntoBytes};

/// Receives from whoever sends.
pub const ANY_SOURCE: Option<usize> = None;
/// Receives whatever the tag is.
pub const ANY_TAG: Option<u32> = None;

/// Ranks that talk among themselves: messages of one communicator are not received by another one. Cheap to clone.
#[derive(Clone)]
pub struct Communicator {
    group: Group,
    message: ActiveMessage,
    inbox: Arc<Inbox>,
}

/// What has come and was not received yet, of all communicators, in the order of arrival. As in MPI it is kept where it
/// is received: longer messages stay in the sender's pages as long as these suffice.
struct Inbox {
    messages: Mutex<VecDeque<(Header, OwnedMessage)>>,
    /// Ranks of which nothing comes any more.
    gone: Mutex<BTreeMap<Rank, Fault>>,
    arrived: Counter,
}

/// Goes with a message, as its info.
#[derive(Clone, Copy, PartialEq, FromBytes, IntoBytes, zerocopy::Immutable)]
#[repr(C)]
struct Header {
    communicator: u64,
    source: u32,
    tag: u32,
}

/// What was received.
#[derive(Debug, PartialEq)]
pub struct Received<T> {
    pub source: usize,
    pub tag: u32,
    pub values: Vec<T>,
}

impl Communicator {
    /// All ranks of the job, `MPI_COMM_WORLD`; once per job, before the first barrier. It sets the job's handler of errors.
    pub fn world(job: &Job) -> Result<Communicator, RegisterError> {
        let (messages, gone) = (Mutex::default(), Mutex::default());
        let inbox = Arc::new(Inbox { messages, gone, arrived: job.counter() });
        let ended = inbox.clone();
        job.on_error(move |fault| {
            if let Fault::PeerLost(rank) | Fault::PeerClosed(rank) | Fault::PeerCorrupt(rank) = fault {
                ended.gone.lock().unwrap().entry(rank).or_insert(fault);
                ended.arrived.add(1);
            }
        });
        let incoming = inbox.clone();
        // Messages from one rank are handled in the order in which it sent them, which is MPI's order, too.
        let message = job.register("communicator", move |message: Message, _: &mut posthaste::Scope| {
            if let Ok(header) = Header::read_from_bytes(message.info()) {
                incoming.messages.lock().unwrap().push_back((header, message.into_owned()));
                incoming.arrived.add(1);
            }
        })?;
        Ok(Communicator { group: job.world(), message, inbox })
    }

    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Sends values to a rank of this communicator. Awaiting it means that they may be changed again; not that they were
    /// received. Not awaited at once but joined with others, it is `MPI_Isend`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub async fn send<T: Datum>(&self, target: usize, tag: u32, values: &[T]) -> Result<(), SendError> {
        let target = self.group.to_job(target).expect("a rank of this communicator");
        let header = Header { communicator: self.group.id(), source: self.rank() as u32, tag };
        self.message.send(target, values.as_bytes().to_vec()).info(header.as_bytes()).await
    }

    /// Receives the first message that matches, or waits for one. Dropped before it is ready, it takes none.
    ///
    /// # Errors
    /// If none is there and the source is gone; from whoever sends, if a rank of this communicator died.
    pub async fn recv<T: Datum>(
        &self,
        source: Option<usize>,
        tag: Option<u32>,
    ) -> Result<Received<T>, Fault> {
        let matches = |header: &Header| {
            header.communicator == self.group.id()
                && source.is_none_or(|source| header.source as usize == source)
                && tag.is_none_or(|tag| header.tag == tag)
        };
        loop {
            let seen = self.inbox.arrived.value();
            let found = {
                let mut messages = self.inbox.messages.lock().unwrap();
                let at = messages.iter().position(|(header, _)| matches(header));
                at.and_then(|at| messages.remove(at))
            };
            if let Some((header, message)) = found {
                let bytes = message.into_bytes();
                let mut values = vec![T::new_zeroed(); bytes.len() / size_of::<T>()];
                let whole = size_of_val(values.as_slice());
                values.as_mut_bytes().copy_from_slice(&bytes[..whole]);
                return Ok(Received { source: header.source as usize, tag: header.tag, values });
            }
            if let Some(fault) = self.whoever_is_gone(source) {
                return Err(fault);
            }
            // Advances the engine meanwhile, and misses nothing that came since the look.
            self.inbox.arrived.reach(seen + 1).await;
        }
    }

    fn whoever_is_gone(&self, source: Option<usize>) -> Option<Fault> {
        let gone = self.inbox.gone.lock().unwrap();
        match source {
            Some(source) => gone.get(&self.group.to_job(source)?).copied(),
            // Who has left in order was done with it; the others may still send.
            None => gone
                .iter()
                .find(|(rank, fault)| {
                    self.group.from_job(**rank).is_some() && !matches!(fault, Fault::PeerClosed(_))
                })
                .map(|(_, fault)| *fault),
        }
    }

    /// Sends and receives at once, so that a ring of ranks can pass something on.
    pub async fn sendrecv<T: Datum>(
        &self,
        (target, values): (usize, &[T]),
        source: usize,
        tag: u32,
    ) -> Result<Vec<T>, SendError> {
        let (sent, received) =
            tokio::join!(self.send(target, tag, values), self.recv(Some(source), Some(tag)));
        sent.and_then(|()| Ok(received?.values))
    }

    pub async fn barrier(&self) -> Result<(), CollectiveError> {
        self.group.barrier().await
    }

    /// The root's values replace those of all others.
    pub async fn bcast<T: Datum>(&self, root: usize, values: &mut [T]) -> Result<(), CollectiveError> {
        let told = self.group.broadcast(root, values).await?;
        values.copy_from_slice(&told);
        Ok(())
    }

    pub async fn allreduce<T: Datum>(
        &self,
        values: &[T],
        operation: &Reduce<T>,
    ) -> Result<Vec<T>, CollectiveError> {
        self.group.all_reduce(values, operation).await
    }

    /// The sum of one value of each rank.
    pub async fn sum<T: Arithmetic>(&self, value: T) -> Result<T, CollectiveError> {
        self.group.all_reduce_one(value, &Reduce::sum()).await
    }

    /// A communicator of the ranks that name the same colour, ordered by key; none for those that name none
    /// (`MPI_UNDEFINED`).
    pub async fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Communicator>, CollectiveError> {
        let group = self.group.split(color, key).await?;
        Ok(group.map(|group| Communicator {
            group,
            message: self.message.clone(),
            inbox: self.inbox.clone(),
        }))
    }
}
