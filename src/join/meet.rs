//! Becoming a job with ranks that were not given everything: who is here, who shares memory with whom, who listens
//! where.
//!
//! All ranks exchange three blobs, whatever the [`Meeting`] is:
//! ```text
//!   1  who I am, and which host I am on          (rank 0: the job's name and key, where the meeting has none)
//!   2  the lowest rank of each host: under which name it hands out arena and doorbells; others fetch theirs
//!   3  whether I have them, and where I listen   (so nobody is taken for near who could not map the memory)
//! ```
//! Ranks that a launcher of ours started have their arena, and only say where they listen (3).

use super::network::{Network, NetworkParts, Whereabouts, own_address};
use crate::error::JoinError;
use crate::place::{Place, layout_of, sizes_of};
use posthaste_core::{JobShape, Rank};
use posthaste_launch::{DeviceChoice, HostBroker, InheritedFds, JobId, JobKey, Meeting, Settings};
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

/// The third blob.
#[derive(Serialize, Deserialize)]
struct Card {
    version: u32,
    clients: u16,
    contexts: u16,
    /// The lowest rank that shares this rank's arena; none: it has no arena.
    near: Option<u32>,
    listens: Vec<SocketAddr>,
    incarnation: u64,
}

impl Party {
    pub fn new(meeting: Box<dyn Meeting>, settings: &Settings) -> Party {
        let (rank, size) = (meeting.rank(), meeting.size());
        Party { meeting, deadline: Instant::now() + settings.join_timeout, rank, size }
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
    pub fds: Option<InheritedFds>,
    pub whereabouts: Whereabouts,
    pub settings: Settings,
}

/// Joins a job whose launcher gave each rank its arena, or none.
pub(crate) async fn join_given(given: Given, party: Party) -> Result<Place, JoinError> {
    let Given { job, key, shape, nodes, fds, whereabouts, settings } = given;
    let rank = Rank(party.rank);
    let lowest = |node: &u32| nodes.iter().position(|other| other == node).map(|at| at as u32);
    let near = fds.as_ref().and(nodes.get(rank.index())).and_then(lowest);
    let place = Place::new(rank, shape, nodes, fds, settings)?;
    finish(place, party, job, &key, near, &whereabouts).await
}

/// Joins a job that another launcher started, or none.
pub(crate) async fn join_found(
    party: Party,
    clients: u16,
    contexts: u16,
    settings: Settings,
    whereabouts: Option<Whereabouts>,
) -> Result<Place, JoinError> {
    let (rank, size) = (party.rank, party.size);
    let shape = JobShape { ranks: size, clients, contexts };
    let mut identity = party.meeting.identity();
    if identity.is_none() && rank == 0 {
        let drawn = |source| JoinError::System { what: "draw the job's key", source };
        identity = Some((JobId::random().map_err(drawn)?, JobKey::random().map_err(drawn)?));
    }
    let told = identity.as_ref().filter(|_| party.meeting.identity().is_none());
    let mine = Greeting {
        version: VERSION,
        clients,
        contexts,
        host: posthaste_launch::host_identity().filter(|_| settings.device != DeviceChoice::Tcp),
        identity: told.map(|(job, key)| (*job.as_bytes(), *key.as_bytes())),
    };
    let (party, greetings) = party.gather("who it is", &mine).await?;
    for (other, greeting) in greetings.iter().enumerate() {
        agree(other, greeting.version, shape, greeting.clients, greeting.contexts)?;
    }
    let (job, key) = match (identity, greetings.first().and_then(|first| first.identity)) {
        (Some(identity), _) => identity,
        (None, Some((job, key))) => (JobId::from_bytes(job), JobKey::from_bytes(key)),
        (None, None) => return Err(JoinError::Stranger { rank: 0, what: "the job's key" }),
    };

    // Ranks of one host, in order; whoever does not say is on a host of its own.
    let host = |rank: usize| greetings.get(rank).and_then(|greeting| greeting.host.as_deref());
    let own = host(rank as usize);
    let group: Vec<u32> = match own {
        Some(_) => (0..size).filter(|&other| host(other as usize) == own).collect(),
        None => vec![rank],
    };
    let index = group.iter().position(|&other| other == rank).unwrap_or(0) as u32;
    let sizes = sizes_of(&settings, shape);
    let arena_bytes = layout_of(shape, sizes)?.total();
    let count = group.len() as u32;
    let shares = settings.device != DeviceChoice::Tcp;
    let (mut broker, mut fds) = (None, None);
    if shares && index == 0 {
        let key = key.clone();
        match blocking(move || Ok(HostBroker::start(job, &key, count, arena_bytes)?)).await {
            Ok((started, own)) => (broker, fds) = (Some(started), Some(own)),
            Err(error) => tracing::warn!(%error, "the ranks of this host share no memory"),
        }
    }
    let name = broker.as_ref().map(|broker| broker.name().to_owned()).unwrap_or_default();
    let (party, names) = party.gather("where its host's memory is handed out", &name).await?;
    let name = names.get(group[0] as usize).cloned().unwrap_or_default();
    if shares && index > 0 && !name.is_empty() {
        let key = key.clone();
        let fetch = move || Ok(HostBroker::fetch(&name, job, &key, index, count)?);
        match blocking(fetch).await {
            Ok(own) => fds = Some(own),
            // A wall between processes that look as if there was none: the others reach this rank over sockets.
            Err(error) => tracing::warn!(%error, "this rank shares no memory with the others of its host"),
        }
    }

    // Who really has the arena.
    let (party, mapped) = party.gather("whether it shares its host's memory", &fds.is_some()).await?;
    let shares_with = |other: u32| group.contains(&other) && mapped.get(other as usize) == Some(&true);
    if let Some(fds) = &mut fds {
        let ring = std::mem::take(&mut fds.ring);
        let near = ring.into_iter().zip(&group).filter(|(_, other)| shares_with(**other));
        fds.ring = near.map(|(fd, _)| fd).collect();
    }
    // A node is named by its lowest rank that shares; ranks that do not are nodes of their own.
    let node_of = |other: u32| {
        let theirs = host(other as usize);
        let same = |third: &u32| theirs.is_some() && host(*third as usize) == theirs;
        let has = |third: &u32| mapped.get(*third as usize) == Some(&true);
        if has(&other) { (0..size).filter(same).find(has).unwrap_or(other) } else { other }
    };
    let nodes: Vec<u32> = (0..size).map(node_of).collect();
    let near = fds.is_some().then(|| nodes[rank as usize]);
    let everywhere = match whereabouts {
        Some(place) => place,
        None if own.is_some() && group.len() == size as usize => Whereabouts::OneHost,
        None => Whereabouts::Anywhere,
    };
    let place = Place::new(Rank(rank), shape, nodes, fds, settings)?;
    let place = finish(place, party, job, &key, near, &everywhere).await?;
    // Everybody has fetched what it wanted.
    drop(broker);
    Ok(place)
}

/// Says where this rank listens and learns it of the others, if any rank needs that.
async fn finish(
    mut place: Place,
    party: Party,
    job: JobId,
    key: &JobKey,
    near: Option<u32>,
    whereabouts: &Whereabouts,
) -> Result<Place, JoinError> {
    let (rank, shape) = (place.rank(), place.shape());
    let settings = place.settings.clone();
    if settings.device == DeviceChoice::Shm && !place.is_one_node() {
        return Err(JoinError::Unreachable);
    }
    let network = if place.is_one_node() && near.is_some() {
        None
    } else {
        Some(Network::listen(&NetworkParts {
            rank,
            shape,
            job,
            key,
            address: own_address(&settings, whereabouts)?,
            settings: &settings,
            incarnation: 1,
            near: place.near_devices(),
        })?)
    };
    let listens = network.as_ref().map(Network::addresses).unwrap_or_default();
    let mine = Card {
        version: VERSION,
        clients: shape.clients,
        contexts: shape.contexts,
        near,
        listens,
        incarnation: 1,
    };
    let (party, cards) = party.gather("where it listens", &mine).await?;
    for (other, card) in cards.iter().enumerate() {
        agree(other, card.version, shape, card.clients, card.contexts)?;
        let reached = near.is_some() && card.near == near;
        match &network {
            Some(network) if card.listens.len() == usize::from(shape.clients) => {
                network.learn(Rank(other as u32), &card.listens, card.incarnation);
            }
            _ if reached => {}
            _ => return Err(JoinError::Stranger { rank: other as u32, what: "where it listens" }),
        }
    }
    if let Some(network) = network {
        place.add_network(network.into_devices());
    }
    place.keep(party.meeting);
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
