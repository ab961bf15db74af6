//! Tells the devices over sockets which ranks are gone, also those that this rank never had a connection with, and which
//! were started again.

use crate::join::listens;
use posthaste_core::reactor::run_unless_dropped;
use posthaste_core::sync::{Mutex, lock};
use posthaste_core::{Fault, JobShape, Rank};
use posthaste_launch::{Bulletin, Duty, Notice, Rendezvous, Succession, Whereabout, Whereabouts};
use posthaste_tcp::{PeerAddress, TcpDevice};
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// The task that listens.
pub(crate) struct Herald {
    task: JoinHandle<()>,
    farewell: oneshot::Sender<Return>,
}

/// How long the task may take to hand over what it listens with: it may be about to listen elsewhere.
const PATIENCE: Duration = Duration::from_secs(6);

/// How long others may need to notice that whoever served the news has ended, besides the time for which a host is silent that has
/// vanished.
const SUCCESSION: Duration = Duration::from_secs(40);
/// How long whoever leaves meanwhile waits for a successor who could tell the others.
const FAREWELL: Duration = Duration::from_secs(4);
/// How long to wait before whoever is to serve the news, and did not answer, is asked again.
const AGAIN: Duration = Duration::from_millis(500);
/// How long to look for one if none is known that lives: it may first have to take the place where the ranks met.
const UNKNOWN: Duration = Duration::from_secs(4);
/// How often to ask for one.
const ASK: Duration = Duration::from_millis(20);

/// The way back for what the task listens with.
type Return = SyncSender<Bulletin>;

/// Where a server of the news is put, if this rank becomes one.
pub(crate) type Serving = Arc<Mutex<Option<Rendezvous>>>;

/// What a herald is made for.
pub(crate) struct HeraldParts {
    pub bulletin: Bulletin,
    /// The rank that serves the news, if one does; their end without a word is its end.
    pub server: Option<Rank>,
    /// The devices of all clients.
    pub devices: Vec<Arc<TcpDevice>>,
    pub shape: JobShape,
    /// The ports where this rank may listen, if not all.
    pub ports: Option<RangeInclusive<u16>>,
    pub serving: Serving,
}

impl Herald {
    /// Listens in a task of this runtime.
    pub fn start(parts: HeraldParts) -> io::Result<Herald> {
        let HeraldParts { bulletin, server, devices, shape, ports, serving } = parts;
        let socket = TcpStream::from_std(bulletin.socket()?)?;
        let (farewell, leaving) = oneshot::channel::<Return>();
        let all = devices.clone();
        let ear = Ear { bulletin, socket, server, named: None, devices, shape, ports, serving };
        // Whoever serves the news takes the end of the connection for the end of this rank, and tells it to the others.
        let ends = move || all.iter().for_each(|device| device.runtime_ends());
        Ok(Herald { task: tokio::spawn(run_unless_dropped(ear.listen(leaving), ends)), farewell })
    }

    /// Tells the others that this rank leaves in order. Blocks for a moment.
    pub fn leave(self) {
        let (sender, bulletin) = sync_channel(1);
        // Nobody listens any more if the news have ended.
        if self.farewell.send(sender).is_ok()
            // The runtime that the task is of may not be run by anybody any more.
            && let Ok(bulletin) = bulletin.recv_timeout(PATIENCE)
            && let Err(error) = bulletin.leave()
        {
            tracing::debug!(%error, "the others could not be told that this rank leaves");
        }
        self.task.abort();
    }
}

/// What the task has.
struct Ear {
    bulletin: Bulletin,
    /// The bulletin's.
    socket: TcpStream,
    server: Option<Rank>,
    /// Who is to serve them from here on, and could not be reached yet.
    named: Option<(Rank, SocketAddr)>,
    devices: Vec<Arc<TcpDevice>>,
    shape: JobShape,
    ports: Option<RangeInclusive<u16>>,
    serving: Serving,
}

/// Somebody who wants the bulletin, to leave with it.
struct Farewell {
    leaving: oneshot::Receiver<Return>,
    asked: Option<Return>,
}

impl Farewell {
    /// Waits until somebody does; for ever once it is known. An error if nobody ever will.
    async fn wanted(&mut self) -> Result<(), oneshot::error::RecvError> {
        if self.asked.is_some() {
            std::future::pending::<()>().await;
        }
        self.asked = Some((&mut self.leaving).await?);
        Ok(())
    }
}

/// Where the news come from next.
enum Next {
    Here,
    /// From this rank itself, which stands by.
    Own {
        duty: Duty,
    },
    There {
        rank: Rank,
        place: SocketAddr,
    },
    /// Whoever serves them has ended: from a successor.
    Lost,
    Nowhere,
}

impl Ear {
    /// Until the news end, or somebody asks for the bulletin.
    async fn listen(mut self, leaving: oneshot::Receiver<Return>) {
        let mut farewell = Farewell { leaving, asked: None };
        // Something may have come before anybody waited for the socket.
        let mut news = self.bulletin.read();
        loop {
            let next = self.pass_on(news);
            let next_is_here = matches!(next, Next::Here);
            // Not given up half-way: whoever wants to leave tells it where the news are heard then.
            let ear = match next {
                Next::Here => Some(self),
                Next::Own { duty } => self.stand_by(duty).await,
                Next::There { rank, place } => self.follow(rank, place).await,
                Next::Lost => self.succession(&mut farewell).await,
                Next::Nowhere => None,
            };
            let Some(ear) = ear else { return };
            self = ear;
            // Behind a duty, or where the news are heard from now on, something may have come already.
            if !next_is_here {
                news = self.bulletin.read();
                continue;
            }
            if let Some(asked) = farewell.asked {
                // Whoever asked waits for it.
                let _ = asked.send(self.bulletin);
                return;
            }
            news = tokio::select! {
                biased;
                wanted = farewell.wanted() => {
                    if wanted.is_err() {
                        return;
                    }
                    Ok(Vec::new())
                }
                news = hear(&self.socket, &mut self.bulletin) => news,
                () = tokio::time::sleep(AGAIN), if self.named.is_some() => {
                    if let Some((rank, place)) = self.named {
                        let Some(ear) = self.follow(rank, place).await else { return };
                        self = ear;
                    }
                    self.bulletin.read()
                }
            };
        }
    }

    /// Tells the devices what has come.
    fn pass_on(&self, news: io::Result<Vec<Notice>>) -> Next {
        let mut next = Next::Here;
        match news {
            Ok(news) => {
                for notice in news {
                    match notice {
                        Notice::Ended(rank) | Notice::Left(rank) => {
                            self.gone(Rank(rank), matches!(notice, Notice::Left(_)));
                        }
                        Notice::Died(rank) => {
                            self.devices.iter().for_each(|device| device.died(Rank(rank)));
                        }
                        Notice::Arrived { rank, incarnation, part } => {
                            self.restarted(rank, incarnation, &part)
                        }
                        Notice::StandBy(duty) => next = Next::Own { duty },
                        Notice::Move { rank, place } => next = Next::There { rank: Rank(rank), place },
                        // The rank that serves them has left in order, with whatever it still had to tell.
                        _ => {
                            if let Some(server) = self.server() {
                                self.gone(server, true);
                            }
                            // Who was named before serves them from here on: whoever was busy for long reads both at once.
                            let named = matches!(next, Next::There { .. });
                            // If nobody could be reached so far, one of those that stand by will serve them.
                            return match self.bulletin.has_successors() {
                                _ if named => next,
                                true => Next::Lost,
                                false => Next::Nowhere,
                            };
                        }
                    }
                }
                next
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => next,
            Err(error) => {
                tracing::debug!(%error, "whoever serves the news of the other ranks has ended");
                match self.server() {
                    Some(server) => {
                        self.gone(server, false);
                        Next::Lost
                    }
                    // The launcher, with which this rank ends.
                    None => Next::Nowhere,
                }
            }
        }
    }

    /// The rank that serves the news.
    fn server(&self) -> Option<Rank> {
        self.bulletin.server().map(Rank).or(self.server)
    }

    fn gone(&self, rank: Rank, left: bool) {
        let fault = if left { Fault::PeerClosed(rank) } else { Fault::PeerLost(rank) };
        for device in &self.devices {
            device.gone(rank, fault);
        }
    }

    fn restarted(&self, rank: u32, incarnation: u32, part: &[u8]) {
        let Some(listens) = listens(part, self.shape) else {
            tracing::warn!(rank, "a rank was started again and does not say where it listens");
            return;
        };
        for (device, address) in self.devices.iter().zip(listens) {
            device.restarted(Rank(rank), PeerAddress { address, incarnation: incarnation.into() });
        }
    }

    /// Stands by to serve the news to the others.
    async fn stand_by(self, duty: Duty) -> Option<Ear> {
        let Ear { bulletin, socket, server, named, devices, shape, ports, serving } = self;
        // Where the others reach this rank anyway.
        let (address, range) = (devices.first()?.address().ip(), ports.clone());
        // Each client of a rank has a port of its own, until that is left.
        let all = devices.clone();
        let whereabouts: Whereabouts = Arc::new(move |rank| {
            let rank = Rank(rank);
            match all.iter().all(|device| device.has_left(rank)) {
                true => Whereabout::Left,
                false => {
                    Whereabout::Listens(all.iter().filter_map(|device| device.peer_address(rank)).collect())
                }
            }
        });
        let standing = move || bulletin.stand_by(duty, address, range, whereabouts);
        match tokio::task::spawn_blocking(standing).await.ok()? {
            Ok((rendezvous, bulletin)) => {
                tracing::debug!(place = %rendezvous.address(), "stands by to serve the news of the other ranks");
                *lock(&serving) = Some(rendezvous);
                let (bulletin, socket) = heard_through(bulletin)?;
                Some(Ear { bulletin, socket, server: None, named: None, devices, shape, ports, serving })
            }
            Err((error, bulletin)) => {
                tracing::warn!(%error, "this rank cannot serve the news of the other ranks");
                Some(Ear { bulletin: *bulletin?, socket, server, named, devices, shape, ports, serving })
            }
        }
    }

    /// Hears the news from whoever serves them after their server has ended without a word. Who wants to leave waits for a
    /// moment, so that the others can be told.
    async fn succession(self, farewell: &mut Farewell) -> Option<Ear> {
        let Ear { mut bulletin, socket: _, server, named: _, devices, shape, ports, serving } = self;
        let began = Instant::now();
        let mut until = began + SUCCESSION + bulletin.silence();
        loop {
            let look = move || (bulletin.find_successor(), bulletin);
            let (found, before) = tokio::task::spawn_blocking(look).await.ok()?;
            match found {
                Succession::Found(bulletin) => {
                    let (bulletin, socket) = heard_through(*bulletin)?;
                    // It may end before it has said which rank it is: then the one before has ended still.
                    let named = None;
                    return Some(Ear { bulletin, socket, server, named, devices, shape, ports, serving });
                }
                Succession::Later if Instant::now() < until => {}
                // Of two, the other was the server; and nobody could be told of a leave.
                Succession::Nobody
                    if shape.ranks > 2 && farewell.asked.is_none() && began.elapsed() < UNKNOWN => {}
                Succession::Later | Succession::Nobody => {
                    tracing::info!("there are no more news of the other ranks");
                    return None;
                }
            }
            bulletin = before;
            tokio::select! {
                biased;
                () = tokio::time::sleep(ASK) => {}
                wanted = farewell.wanted() => {
                    if wanted.is_err() {
                        return None;
                    }
                    until = until.min(Instant::now() + FAREWELL);
                }
            }
        }
    }

    /// Hears the news from another rank from here on.
    async fn follow(self, rank: Rank, place: SocketAddr) -> Option<Ear> {
        let Ear { bulletin, socket, server, named: _, devices, shape, ports, serving } = self;
        match tokio::task::spawn_blocking(move || bulletin.follow(place)).await.ok()? {
            Ok(bulletin) => {
                let (bulletin, socket) = heard_through(bulletin)?;
                Some(Ear {
                    bulletin,
                    socket,
                    server: Some(rank),
                    named: None,
                    devices,
                    shape,
                    ports,
                    serving,
                })
            }
            Err((error, bulletin)) => {
                tracing::warn!(%error, %rank, %place, "the rank that serves the news cannot be reached");
                // It may be stopped, and go on: whoever has named it does not do so again.
                let named = Some((rank, place));
                Some(Ear { bulletin: *bulletin, socket, server, named, devices, shape, ports, serving })
            }
        }
    }
}

fn heard_through(bulletin: Bulletin) -> Option<(Bulletin, TcpStream)> {
    match bulletin.socket().and_then(TcpStream::from_std) {
        Ok(socket) => Some((bulletin, socket)),
        Err(error) => {
            tracing::warn!(%error, "the news of the other ranks cannot be listened to");
            bulletin.give_up();
            None
        }
    }
}

/// Waits for something to come.
async fn hear(socket: &TcpStream, bulletin: &mut Bulletin) -> io::Result<Vec<Notice>> {
    socket.readable().await?;
    socket.try_io(tokio::io::Interest::READABLE, || {
        let news = bulletin.read()?;
        // So that the runtime waits for the socket again.
        if news.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(news) }
    })
}
