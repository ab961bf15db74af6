//! Becoming a job with ranks that were not given everything: who is here, who shares memory with whom, who listens
//! where.
//!
//! All ranks exchange four blobs, whatever the [`Meeting`] is:
//! ```text
//!   1  who I am, and which host I am on          (rank 0: the job's name and key, where the meeting has none)
//!   2  the lowest rank of each host: under which name it hands out arena and doorbells; others fetch theirs
//!   3  whether I have them                       (so nobody is taken for near who could not map the memory)
//!   4  where I listen
//! ```
//! Ranks that a launcher of ours started have their arena, and only say where they listen. A rank that shares memory with
//! nobody is a node of its own.

use super::network::{Network, NetworkParts, Whereabouts, own_address};
use crate::error::JoinError;
use crate::place::{Place, layout_of, sizes_of};
use posthaste_core::{JobShape, Rank};
use posthaste_launch::{DeviceChoice, HostBroker, HostFds, InheritedFds, JobId, JobKey, Meeting, Settings};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Instant;

/// Of what the blobs say; ranks of another version are refused.
const VERSION: u32 = 1;

/// A meeting, and how long it may take.
pub(crate) struct Party {
    meeting: Box<dyn Meeting>,
    deadline: Instant,
    pub rank: u32,
    pub size: u32,
}

/// The first blob.
#[derive(Serialize, Deserialize)]
struct Greeting {
    version: u32,
    clients: u16,
    contexts: u16,
    /// None: shares memory with nobody.
    host: Option<String>,
    /// Rank 0's, where the meeting has no identity of its own.
    identity: Option<([u8; 16], [u8; 32])>,
}

/// The last blob.
#[derive(Serialize, Deserialize)]
struct Card {
    version: u32,
    clients: u16,
    contexts: u16,
    listens: Vec<SocketAddr>,
    incarnation: u64,
}

impl Party {
    pub fn new(meeting: Box<dyn Meeting>, deadline: Instant) -> Party {
        let (rank, size) = (meeting.rank(), meeting.size());
        Party { meeting, deadline, rank, size }
    }

    /// Gives a value and gets everybody's.
    async fn gather<T: Serialize + DeserializeOwned>(
        mut self,
        what: &'static str,
        mine: &T,
    ) -> Result<(Party, Vec<T>), JoinError> {
        let unreadable = |rank: usize| JoinError::Stranger { rank: rank as u32, what };
        let blob = postcard::to_allocvec(mine).map_err(|_| unreadable(self.rank as usize))?;
        let (party, blobs) = blocking(move || {
            let blobs = self.meeting.all_gather(&blob, self.deadline)?;
            Ok::<_, JoinError>((self, blobs))
        })
        .await?;
        let read = |(rank, blob): (usize, &Vec<u8>)| {
            // Nothing is left over either.
            match postcard::take_from_bytes::<T>(blob) {
                Ok((value, [])) => Ok(value),
                _ => Err(unreadable(rank)),
            }
        };
        let values = blobs.iter().enumerate().map(read).collect::<Result<_, _>>()?;
        Ok((party, values))
    }
}

/// Runs what blocks where that is allowed.
pub(crate) async fn blocking<T: Send + 'static>(
    run: impl FnOnce() -> Result<T, JoinError> + Send + 'static,
) -> Result<T, JoinError> {
    let ended = tokio::task::spawn_blocking(run).await;
    ended.map_err(|_| JoinError::Runtime("the runtime was shut down while joining"))?
}

/// What a launcher of ours said.
pub(crate) struct Given {
    pub job: JobId,
    pub key: JobKey,
    pub shape: JobShape,
    pub nodes: Vec<u32>,
    /// None: this rank shares memory with nobody.
    pub fds: Option<InheritedFds>,
    pub whereabouts: Whereabouts,
    pub settings: Settings,
}

/// Joins a job whose launcher said which ranks share memory.
pub(crate) async fn join_given(given: Given, party: Party) -> Result<Place, JoinError> {
    let Given { job, key, shape, nodes, fds, whereabouts, settings } = given;
    let rank = Rank(party.rank);
    let neighbours = nodes.iter().filter(|node| Some(*node) == nodes.get(rank.index())).count();
    let (nodes, fds) = match fds {
        Some(fds) => (nodes, fds),
        None => ((0..shape.ranks).collect(), alone(shape, &settings)?),
    };
    let place = Place::new(rank, shape, nodes, fds, neighbours, settings)?;
    finish(place, party, job, &key, &whereabouts, None).await
}

/// Memory and doorbell of a rank that shares them with nobody.
fn alone(shape: JobShape, settings: &Settings) -> Result<InheritedFds, JoinError> {
    let bytes = layout_of(shape, sizes_of(settings, shape))?.total();
    let refused = |source| JoinError::System { what: "make this rank's memory", source };
    HostFds::new(1, bytes)?.local(0).map_err(refused)
}

/// Joins a job that another launcher started.
pub(crate) async fn join_found(
    party: Party,
    clients: u16,
    contexts: u16,
    settings: Settings,
    whereabouts: Option<Whereabouts>,
) -> Result<Place, JoinError> {
    let (rank, size) = (party.rank, party.size);
    let shape = JobShape { ranks: size, clients, contexts };
    let said = party.meeting.identity();
    // A place of ours, which rank 0 serves.
    let served_by = said.as_ref().map(|_| Rank(0));
    let drawn = match said {
        None if rank == 0 => {
            let refused = |source| JoinError::System { what: "draw the job's key", source };
            Some((JobId::random().map_err(refused)?, JobKey::random().map_err(refused)?))
        }
        _ => None,
    };
    let mine = Greeting {
        version: VERSION,
        clients,
        contexts,
        host: posthaste_launch::host_identity(),
        identity: drawn.as_ref().map(|(job, key)| (*job.as_bytes(), *key.as_bytes())),
    };
    let (party, greetings) = party.gather("who it is", &mine).await?;
    for (other, greeting) in greetings.iter().enumerate() {
        agree(other, greeting.version, shape, greeting.clients, greeting.contexts)?;
    }
    let told = greetings.first().and_then(|first| first.identity);
    let told = told.map(|(job, key)| (JobId::from_bytes(job), JobKey::from_bytes(key)));
    let (job, key) =
        said.or(told).ok_or(JoinError::Stranger { rank: 0, what: "the job's identity and key" })?;

    // Ranks of one host, in order; whoever does not say is on a host of its own.
    let host = |rank: u32| greetings.get(rank as usize).and_then(|greeting| greeting.host.as_deref());
    let group: Vec<u32> = match host(rank) {
        Some(own) => (0..size).filter(|&other| host(other) == Some(own)).collect(),
        None => vec![rank],
    };
    let one_host = group.len() == size as usize;
    let (party, shared) = share(party, &group, job, &key, shape, &settings).await?;
    let fds = match shared.fds {
        Some(fds) => fds,
        None => alone(shape, &settings)?,
    };
    // A node is named by its lowest rank that shares.
    let shares = |other: &u32| shared.by_rank.get(*other as usize) == Some(&true);
    let node_of = |other: u32| {
        let mut of_host = (0..size).filter(|third| host(*third) == host(other));
        if shares(&other) { of_host.find(shares).unwrap_or(other) } else { other }
    };
    let nodes: Vec<u32> = (0..size).map(node_of).collect();
    let whereabouts = match whereabouts {
        Some(place) => place,
        None if one_host => Whereabouts::OneHost,
        None => Whereabouts::Anywhere,
    };
    let place = Place::new(Rank(rank), shape, nodes, fds, group.len(), settings)?;
    finish(place, party, job, &key, &whereabouts, served_by).await
}

/// Who shares a host's memory.
struct Shared {
    /// This rank's part of it; none if it has no part.
    fds: Option<InheritedFds>,
    by_rank: Vec<bool>,
}

/// The lowest rank of a host makes its memory, the others fetch their part.
async fn share(
    party: Party,
    group: &[u32],
    job: JobId,
    key: &JobKey,
    shape: JobShape,
    settings: &Settings,
) -> Result<(Party, Shared), JoinError> {
    let rank = party.rank;
    let wanted = settings.device != DeviceChoice::Tcp && group.len() > 1;
    let (index, count) = (group.iter().position(|&other| other == rank).unwrap_or(0), group.len() as u32);
    let (mut broker, mut fds) = (None, None);
    if wanted && index == 0 {
        let bytes = layout_of(shape, sizes_of(settings, shape))?.total();
        let key = key.clone();
        match blocking(move || Ok(HostBroker::start(job, &key, count, bytes)?)).await {
            Ok((started, own)) => (broker, fds) = (Some(started), Some(own)),
            Err(error) => tracing::warn!(%error, "the ranks of this host share no memory"),
        }
    }
    let name = broker.as_ref().map(|broker| broker.name().to_owned()).unwrap_or_default();
    let (party, names) = party.gather("where its host's memory is handed out", &name).await?;
    let name = group.first().and_then(|&first| names.get(first as usize)).cloned().unwrap_or_default();
    if wanted && index > 0 && !name.is_empty() {
        let key = key.clone();
        match blocking(move || Ok(HostBroker::fetch(&name, job, &key, index as u32, count)?)).await {
            Ok(own) => fds = Some(own),
            // A wall between processes that look as if there was none: the others reach this rank over sockets.
            Err(error) => tracing::warn!(%error, "this rank shares no memory with the others of its host"),
        }
    }
    let (party, by_rank) = party.gather("whether it shares its host's memory", &fds.is_some()).await?;
    // Everybody has what it wanted.
    drop(broker);
    if let Some(fds) = &mut fds {
        let ring = std::mem::take(&mut fds.ring);
        let shares = |rank: &u32| by_rank.get(*rank as usize) == Some(&true);
        fds.ring = ring.into_iter().zip(group).filter(|(_, rank)| shares(rank)).map(|(fd, _)| fd).collect();
    }
    Ok((party, Shared { fds, by_rank }))
}

/// Says where this rank listens and learns it of the others, if any rank needs that. `served_by`: whose end is that of the
/// meeting, if it is served by a rank.
async fn finish(
    mut place: Place,
    party: Party,
    job: JobId,
    key: &JobKey,
    whereabouts: &Whereabouts,
    served_by: Option<Rank>,
) -> Result<Place, JoinError> {
    let (rank, shape, one_node) = (place.rank(), place.shape(), place.is_one_node());
    let mut network = None;
    if !one_node {
        let settings = &place.settings;
        if settings.device == DeviceChoice::Shm {
            return Err(JoinError::Unreachable);
        }
        network = Some(Network::listen(&NetworkParts {
            rank,
            shape,
            job,
            key,
            address: own_address(settings, whereabouts)?,
            settings,
            incarnation: 1,
            near: place.near_devices(),
        })?);
    }
    let mine = Card {
        version: VERSION,
        clients: shape.clients,
        contexts: shape.contexts,
        listens: network.as_ref().map(Network::addresses).unwrap_or_default(),
        incarnation: 1,
    };
    let (party, cards) = party.gather("where it listens", &mine).await?;
    for (other, card) in cards.iter().enumerate() {
        agree(other, card.version, shape, card.clients, card.contexts)?;
        let expected = if one_node { 0 } else { usize::from(shape.clients) };
        if card.listens.len() != expected {
            return Err(JoinError::Stranger { rank: other as u32, what: "where it listens" });
        }
        if let Some(network) = &network {
            network.learn(Rank(other as u32), &card.listens, card.incarnation);
        }
    }
    let mut meeting = party.meeting;
    if let Some(network) = network {
        place.add_network(network.into_devices());
        // A bulletin is asked for in a few bytes that the server's socket has room for.
        if let Some(bulletin) = meeting.bulletin() {
            let refused = |source| JoinError::System { what: "listen to who is gone", source };
            place.listen(bulletin, served_by).map_err(refused)?;
        }
    }
    place.keep(meeting);
    Ok(place)
}

/// Whether another rank's idea of the job is this one's.
fn agree(rank: usize, version: u32, shape: JobShape, clients: u16, contexts: u16) -> Result<(), JoinError> {
    if version != VERSION {
        return Err(JoinError::Version { rank: rank as u32, said: version, own: VERSION });
    }
    if (clients, contexts) != (shape.clients, shape.contexts) {
        let said = JobShape { clients, contexts, ..shape };
        return Err(JoinError::Disagree { rank: rank as u32, said, own: shape });
    }
    Ok(())
}
