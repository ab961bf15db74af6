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
//! Ranks that a launcher of ours started have their arena, and say 3 and 4: one that died before it came here left its memory to
//! nobody, and one that is to use sockets only has none. A rank that shares memory with nobody is a node of its own.
//!
//! A rank that is started again, because its process died, finds all that was said in the roster: the last blobs. It is a
//! node of its own, and says where it listens; the others are told.

use super::network::{Network, NetworkParts, Whereabouts, own_address};
use crate::error::JoinError;
use crate::place::{Place, layout_of, sizes_of};
use posthaste_core::{JobShape, Rank};
use posthaste_launch::{
    DeviceChoice, HostBroker, HostFds, InheritedFds, JobId, JobKey, Meeting, Rendezvous, Settings,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long to try to hear who is gone, where that is not said by the meeting.
const NEWS: Duration = Duration::from_secs(20);
/// Of what the blobs say; ranks of another version are refused.
const VERSION: u32 = 4;

/// A meeting, and how long it may take.
pub(crate) struct Party {
    meeting: Attended,
    deadline: Instant,
    pub rank: u32,
    pub size: u32,
}

/// A meeting that ends, if joining fails, where that may take its time: not in a task, where others would wait with it.
struct Attended(Option<Box<dyn Meeting>>);

/// What is asked of a meeting that was handed on.
const ENDED: JoinError = JoinError::Runtime("the meeting of the ranks has ended");

impl Attended {
    /// # Errors
    /// If it was taken before.
    fn get(&mut self) -> Result<&mut Box<dyn Meeting>, JoinError> {
        self.0.as_mut().ok_or(ENDED)
    }

    fn take(&mut self) -> Result<Box<dyn Meeting>, JoinError> {
        self.0.take().ok_or(ENDED)
    }
}

impl Drop for Attended {
    fn drop(&mut self) {
        if let Some(meeting) = self.0.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let _ended_later = runtime.spawn_blocking(move || drop(meeting));
        }
    }
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
    /// By which it judges what others send before they are given credit for more.
    credit_bytes: u64,
    /// The node of its first incarnation.
    node: u32,
    listens: Vec<SocketAddr>,
    /// Where rank 0 tells who is gone, if the meeting does not.
    news: Option<SocketAddr>,
}

impl Party {
    pub fn new(meeting: Box<dyn Meeting>, deadline: Instant) -> Party {
        let (rank, size) = (meeting.rank(), meeting.size());
        Party { meeting: Attended(Some(meeting)), deadline, rank, size }
    }

    /// Which incarnation of its rank this process is.
    pub fn incarnation(&self) -> u32 {
        self.meeting.0.as_ref().map_or(0, |meeting| meeting.incarnation())
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
            let gathered =
                self.meeting.get().and_then(|meeting| Ok(meeting.all_gather(&blob, self.deadline)?));
            if gathered.is_err() {
                // Here and now: this process may end as soon as it hears of it, and whoever serves tells the others first.
                drop(self.meeting.0.take());
            }
            gathered.map(|blobs| (self, blobs))
        })
        .await?;
        let read = |(rank, blob): (usize, &Vec<u8>)| read(blob).ok_or_else(|| unreadable(rank));
        let values = blobs.iter().enumerate().map(read).collect::<Result<_, _>>()?;
        Ok((party, values))
    }

    /// What all have said last, for a rank that comes again.
    async fn roster(mut self) -> Result<(Party, Vec<(u32, Card)>), JoinError> {
        let (party, blobs) = blocking(move || {
            let blobs = self.meeting.get()?.roster(self.deadline)?;
            Ok::<_, JoinError>((self, blobs))
        })
        .await?;
        let what = "where it listens";
        let read = |(rank, (incarnation, blob)): (u32, &(u32, Vec<u8>))| {
            Ok((*incarnation, read(blob).ok_or(JoinError::Stranger { rank, what })?))
        };
        let cards = (0..).zip(&blobs).map(read).collect::<Result<_, JoinError>>()?;
        Ok((party, cards))
    }

    /// Says where this rank listens, as one that comes again.
    async fn come_again(mut self, card: &Card) -> Result<Party, JoinError> {
        let unreadable = JoinError::Stranger { rank: self.rank, what: "where it listens" };
        let blob = postcard::to_allocvec(card).map_err(|_| unreadable)?;
        blocking(move || {
            self.meeting.get()?.come_again(&blob, self.deadline)?;
            Ok(self)
        })
        .await
    }
}

/// A blob as what it says; nothing is left over either.
fn read<T: DeserializeOwned>(blob: &[u8]) -> Option<T> {
    match postcard::take_from_bytes::<T>(blob) {
        Ok((value, [])) => Some(value),
        _ => None,
    }
}

/// Where a rank that was started again listens, by client, as a blob says.
pub(crate) fn listens(blob: &[u8], shape: JobShape) -> Option<Vec<SocketAddr>> {
    let card = read::<Card>(blob)?;
    let fits = (card.version, card.clients, card.contexts) == (VERSION, shape.clients, shape.contexts)
        && card.listens.len() == usize::from(shape.clients);
    fits.then_some(card.listens)
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
    /// Ranks that die may be started again: all are to be reached over sockets.
    pub restart: bool,
    pub settings: Settings,
}

/// Joins a job whose launcher said which ranks share memory.
pub(crate) async fn join_given(given: Given, party: Party) -> Result<Place, JoinError> {
    let Given { job, key, shape, nodes, fds, whereabouts, restart, settings } = given;
    let rank = Rank(party.rank);
    if party.incarnation() > 0 {
        return join_again(party, shape, job, &key, &whereabouts, settings, None).await;
    }
    let own = nodes.get(rank.index()).copied();
    let group: Vec<u32> =
        (0..).zip(&nodes).filter(|(_, node)| Some(**node) == own).map(|(rank, _)| rank).collect();
    let (mut party, mut nodes, mut fds) = (party, nodes, fds);
    // A rank that died before it came here left its memory to nobody: whoever comes in its place has none. Nor has a rank that is
    // to use sockets only.
    let (gathered, by_rank) = party.gather("whether it has its host's memory", &fds.is_some()).await?;
    if by_rank.contains(&false) {
        nodes = nodes_of_sharers(shape.ranks, &by_rank, |rank| nodes.get(rank as usize));
        if let Some(fds) = &mut fds {
            fds.keep_of(&group, &by_rank);
        }
    }
    party = gathered;
    let fds = match fds {
        Some(fds) => fds,
        None => alone(shape, &settings)?,
    };
    let place = Place::new(rank, shape, nodes, fds, group.len(), settings, 0)?;
    let news = News::OfMeeting(None);
    let finish = Finish { job, key: &key, whereabouts: &whereabouts, news, restart };
    finish.run(place, party).await
}

/// Joins a job as a rank that was part of it before and died. It shares memory with nobody: what the others have mapped is
/// its predecessor's.
async fn join_again(
    party: Party,
    shape: JobShape,
    job: JobId,
    key: &JobKey,
    whereabouts: &Whereabouts,
    settings: Settings,
    served_by: Option<Rank>,
) -> Result<Place, JoinError> {
    let (rank, incarnation) = (Rank(party.rank), party.incarnation());
    tracing::info!(%rank, incarnation, "this rank was started again");
    let (party, cards) = party.roster().await?;
    for (other, (_, card)) in cards.iter().enumerate() {
        agree(other, card.version, shape, card.clients, card.contexts)?;
        count_alike(other, card, &settings)?;
        if card.listens.len() != usize::from(shape.clients) {
            return Err(JoinError::Alone { rank: rank.0 });
        }
    }
    let nodes: Vec<u32> = cards.iter().map(|(_, card)| card.node).collect();
    let neighbours = nodes.iter().filter(|node| Some(*node) == nodes.get(rank.index())).count();
    let fds = alone(shape, &settings)?;
    let own = (0..shape.ranks).collect();
    let mut place = Place::new(rank, shape, own, fds, neighbours, settings, incarnation)?;
    place.come_again(nodes);
    let network = Network::listen(&NetworkParts {
        rank,
        shape,
        job,
        key,
        address: own_address(&place.settings, whereabouts)?,
        settings: &place.settings,
        incarnation: incarnation.into(),
        near: place.near_devices(),
    })?;
    for (other, (incarnation, card)) in (0..).zip(&cards) {
        if other != rank.0 {
            network.learn(Rank(other), &card.listens, (*incarnation).into());
        }
    }
    let mine = Card {
        version: VERSION,
        clients: shape.clients,
        contexts: shape.contexts,
        credit_bytes: place.settings.credit_bytes,
        node: place.node_of(rank),
        listens: network.addresses(),
        news: None,
    };
    let mut party = party.come_again(&mine).await?;
    place.add_network(network.into_devices());
    place.attend(party.meeting.take()?, served_by)?;
    Ok(place)
}

/// Memory and doorbell of a rank that shares them with nobody.
pub(crate) fn alone(shape: JobShape, settings: &Settings) -> Result<InheritedFds, JoinError> {
    let bytes = layout_of(shape, sizes_of(settings, shape))?.total();
    let refused = |source| JoinError::System { what: "make this rank's memory", source };
    HostFds::new(1, bytes)?.local(0).map_err(refused)
}

/// Joins a job that another launcher started.
pub(crate) async fn join_found(
    mut party: Party,
    clients: u16,
    contexts: u16,
    settings: Settings,
    whereabouts: Option<Whereabouts>,
) -> Result<Place, JoinError> {
    let (rank, size) = (party.rank, party.size);
    let shape = JobShape { ranks: size, clients, contexts };
    let said = party.meeting.get()?.identity();
    if party.incarnation() > 0 {
        let (job, key) = said.ok_or(JoinError::Stranger { rank: 0, what: "the job's identity and key" })?;
        let whereabouts = whereabouts.unwrap_or(Whereabouts::Anywhere);
        return join_again(party, shape, job, &key, &whereabouts, settings, Some(Rank(0))).await;
    }
    // A launcher's own meeting tells nobody's end.
    let news = if said.is_some() { News::OfMeeting(Some(Rank(0))) } else { News::OfRank0 };
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
    let nodes = nodes_of_sharers(size, &shared.by_rank, host);
    let whereabouts = match whereabouts {
        Some(place) => place,
        None if one_host => Whereabouts::OneHost,
        None => Whereabouts::Anywhere,
    };
    let place = Place::new(Rank(rank), shape, nodes, fds, group.len(), settings, 0)?;
    let finish = Finish { job, key: &key, whereabouts: &whereabouts, news, restart: false };
    finish.run(place, party).await
}

/// The node of each rank, named by its lowest rank that shares the memory of its host; whoever shares none is one of its own.
fn nodes_of_sharers<H: PartialEq>(size: u32, by_rank: &[bool], host: impl Fn(u32) -> H) -> Vec<u32> {
    let shares = |other: &u32| by_rank.get(*other as usize) == Some(&true);
    let node_of = |other: u32| {
        let mut of_host = (0..size).filter(|third| host(*third) == host(other));
        if shares(&other) { of_host.find(shares).unwrap_or(other) } else { other }
    };
    (0..size).map(node_of).collect()
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
        fds.keep_of(group, &by_rank);
    }
    Ok((party, Shared { fds, by_rank }))
}

/// Who tells of ranks that are gone.
enum News {
    /// Whoever serves the meeting; its end is that of this rank, if one does.
    OfMeeting(Option<Rank>),
    /// Rank 0, at a place of its own.
    OfRank0,
}

/// The last step of joining.
struct Finish<'a> {
    job: JobId,
    key: &'a JobKey,
    whereabouts: &'a Whereabouts,
    news: News,
    /// Ranks that share memory listen, too: one of them may come again.
    restart: bool,
}

impl Finish<'_> {
    /// Says where this rank listens and learns it of the others, if any rank needs that.
    async fn run(self, mut place: Place, party: Party) -> Result<Place, JoinError> {
        let (rank, shape) = (place.rank(), place.shape());
        let far = self.restart || !place.is_one_node();
        let mut network = None;
        if far {
            let settings = &place.settings;
            if settings.device == DeviceChoice::Shm {
                return Err(JoinError::Unreachable);
            }
            network = Some(Network::listen(&NetworkParts {
                rank,
                shape,
                job: self.job,
                key: self.key,
                address: own_address(settings, self.whereabouts)?,
                settings,
                incarnation: 0,
                near: place.near_devices(),
            })?);
        }
        let listens = network.as_ref().map(Network::addresses).unwrap_or_default();
        let mut server = None;
        if let (Rank(0), News::OfRank0, Some(listens)) = (rank, &self.news, listens.first()) {
            let served = Rendezvous::tell(
                listens.ip(),
                place.settings.tcp_ports.clone(),
                shape.ranks,
                self.key,
                self.job,
                place.settings.tcp_timeout,
            );
            match served {
                Ok(served) => server = Some(served),
                Err(error) => tracing::warn!(%error, "nobody is told of ranks that end unmet"),
            }
        }
        let mine = Card {
            version: VERSION,
            clients: shape.clients,
            contexts: shape.contexts,
            credit_bytes: place.settings.credit_bytes,
            node: place.node_of(rank),
            listens,
            news: server.as_ref().map(Rendezvous::address),
        };
        let (mut party, cards) = party.gather("where it listens", &mine).await?;
        for (other, card) in cards.iter().enumerate() {
            agree(other, card.version, shape, card.clients, card.contexts)?;
            count_alike(other, card, &place.settings)?;
            let expected = if far { usize::from(shape.clients) } else { 0 };
            if card.listens.len() != expected {
                return Err(JoinError::Stranger { rank: other as u32, what: "where it listens" });
            }
            if let Some(network) = &network {
                network.learn(Rank(other as u32), &card.listens, 0);
            }
        }
        match network {
            Some(network) => {
                place.add_network(network.into_devices());
                if let Some(server) = server {
                    place.serve(server);
                }
                match self.news {
                    News::OfMeeting(server) => place.attend(party.meeting.take()?, server)?,
                    News::OfRank0 => {
                        if let Some(news) = cards.first().and_then(|card| card.news) {
                            let (key, until) = (self.key.clone(), Instant::now() + NEWS);
                            let silence = place.settings.tcp_timeout;
                            let heard = move || {
                                let place = [news.to_string()];
                                let seat =
                                    Rendezvous::meet(&place, rank.0, shape.ranks, &key, until, silence);
                                Ok(seat.map(|mut seat| seat.bulletin()))
                            };
                            match blocking(heard).await? {
                                Ok(Some(bulletin)) => place.listen(bulletin, Some(Rank(0)))?,
                                Ok(None) => {
                                    tracing::warn!(%news, "rank 0 has ended where it tells who is gone")
                                }
                                // The job can do without them.
                                Err(error) => tracing::warn!(%error, "this rank does not hear who is gone"),
                            }
                        }
                        place.keep(party.meeting.take()?);
                    }
                }
            }
            None => place.keep(party.meeting.take()?),
        }
        Ok(place)
    }
}

/// Whether another rank counts credit as this one does: by another count an honest rank is one that breaks the rules.
fn count_alike(rank: usize, card: &Card, settings: &Settings) -> Result<(), JoinError> {
    let (said, own) = (card.credit_bytes, settings.credit_bytes);
    if said == own { Ok(()) } else { Err(JoinError::CreditBytes { rank: rank as u32, said, own }) }
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
