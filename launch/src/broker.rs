//! Hands descriptors to ranks that did not inherit them.
//!
//! One thread of the launcher serves an abstract Unix socket with a random name, which vanishes with it. A client is
//! heard only if it runs as our user, and gets something only once it has proved to know the job's key.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, bind, listen, recv, sendmsg, socket_with, sockopt,
};
use rustix::process::geteuid;

use crate::bounded_log::BoundedLog;
use crate::env::JobEnv;
use crate::fds::SharedFds;
use crate::frame::{FRAME_BYTES, Frame, Kind, PARCEL, Why, join_proof, welcome_proof};
use crate::key::{JobId, JobKey, fill_random};

/// How long a client has, from its connection to its last parcel.
const DEADLINE: Duration = Duration::from_secs(5);
/// How long others are waited for whose descriptors are on their way.
const CROWDED: Duration = Duration::from_secs(1);
/// How many clients that have proved nothing may be connected.
const MOST_STRANGERS: usize = 16;

/// The broker's thread, which ends with this value.
#[derive(Debug)]
pub(crate) struct Broker {
    name: String,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Broker {
    /// Starts to offer these ranks, each with the read end of its doorbell.
    pub(crate) fn start(
        env: &JobEnv,
        shared: Arc<SharedFds>,
        offers: BTreeMap<u32, OwnedFd>,
    ) -> io::Result<Self> {
        let mut random = [0; 16];
        fill_random(&mut random)?;
        let name = format!("posthaste-{:032x}", u128::from_ne_bytes(random));
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        listen(&listener, 128)?;
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let server = Server {
            listener,
            stop: Arc::clone(&stop),
            job: env.job,
            key: env.key.clone(),
            shared: Some(shared),
            offers: offers.into_iter().map(|(rank, bell)| (rank, Offer::Free(bell))).collect(),
            clients: Vec::with_capacity(MOST_STRANGERS),
            log: BoundedLog::new(Instant::now()),
        };
        let thread = std::thread::Builder::new().name("broker".into()).spawn(move || server.run())?;
        Ok(Self { name, stop, thread: Some(thread) })
    }

    /// The abstract name of the socket.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A rank that somebody may join as.
enum Offer {
    Free(OwnedFd),
    /// A client that has proved to know the key is being given it.
    Promised(OwnedFd),
    Taken,
}

struct Client {
    socket: OwnedFd,
    deadline: Instant,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    /// Nothing is proved; this was the challenge.
    Asked([u8; 32]),
    /// The key is proved; descriptors from this index on have yet to be sent.
    Giving { rank: u32, next: usize },
}

/// What becomes of a client after a step.
enum Step {
    Stay,
    /// It is served, or has gone.
    Leave,
    /// It gets this answer, and the log this line.
    Refuse(Option<Why>, &'static str),
}

struct Server {
    listener: OwnedFd,
    stop: Arc<OwnedFd>,
    job: JobId,
    key: JobKey,
    /// Given up once nothing is left to hand out.
    shared: Option<Arc<SharedFds>>,
    offers: BTreeMap<u32, Offer>,
    clients: Vec<Client>,
    log: BoundedLog,
}

impl Server {
    fn run(mut self) {
        loop {
            let (stopped, connecting, ready) = match self.sleep() {
                Ok(events) => events,
                Err(error) => {
                    // Out of memory at worst; do not turn that into a busy loop.
                    tracing::error!(%error, "the broker cannot poll");
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            if stopped {
                return;
            }
            self.serve(&ready);
            if connecting {
                self.accept();
            }
        }
    }

    /// Sleeps until something is to be done: whether to stop, whether somebody connects, which clients are ready.
    fn sleep(&self) -> io::Result<(bool, bool, Vec<bool>)> {
        let mut fds =
            vec![PollFd::new(&*self.stop, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.clients.iter().map(|client| {
            let events = match client.stage {
                Stage::Asked(_) => PollFlags::IN,
                Stage::Giving { .. } => PollFlags::OUT,
            };
            PollFd::new(&client.socket, events)
        }));
        let timeout = self.clients.iter().map(|client| client.deadline).min().map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            // Each is looked at, not told that it is late.
            Err(Errno::INTR) => return Ok((false, false, vec![true; self.clients.len()])),
            Err(errno) => return Err(errno.into()),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        Ok((ready[0], ready[1], ready[2..].to_vec()))
    }

    fn serve(&mut self, ready: &[bool]) {
        let now = Instant::now();
        let clients = std::mem::take(&mut self.clients);
        for (mut client, ready) in clients.into_iter().zip(ready) {
            let step = match client.stage {
                _ if !ready => Step::Stay,
                Stage::Asked(nonce) => self.hear(&mut client, nonce),
                Stage::Giving { rank, next } => self.give(&mut client, rank, next),
            };
            match step {
                // What it has said in time counts, though this side may not have looked for a while.
                Step::Stay if client.deadline <= now => {
                    self.refuse(&client.socket, None, "it was too slow");
                }
                Step::Stay => {
                    self.clients.push(client);
                    continue;
                }
                Step::Leave => {}
                Step::Refuse(why, reason) => self.refuse(&client.socket, why, reason),
            }
            if let Stage::Giving { rank, .. } = client.stage {
                self.take_back(rank);
            }
        }
        if !self.offers.values().any(|offer| matches!(offer, Offer::Free(_) | Offer::Promised(_))) {
            self.shared = None;
        }
    }

    fn accept(&mut self) {
        // As many as could be served at once; the listener stays ready for the rest.
        for _ in 0..MOST_STRANGERS {
            let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => {
                    // Out of descriptors, mostly; the client waits in the queue meanwhile.
                    tracing::error!(%errno, "the broker cannot accept");
                    std::thread::sleep(Duration::from_millis(10));
                    return;
                }
            };
            let ours = sockopt::socket_peercred(&socket).is_ok_and(|peer| peer.uid == geteuid());
            let strangers =
                self.clients.iter().filter(|client| matches!(client.stage, Stage::Asked(_))).count();
            let mut challenge = Frame::new(Kind::Challenge);
            if !ours {
                self.refuse(&socket, None, "it runs as another user");
            } else if strangers >= MOST_STRANGERS {
                self.refuse(&socket, Some(Why::Busy), "too many others have proved nothing yet");
            } else if fill_random(&mut challenge.nonce).is_ok() && send(&socket, &challenge, &[]).is_ok() {
                let deadline = Instant::now() + DEADLINE;
                self.clients.push(Client { socket, deadline, stage: Stage::Asked(challenge.nonce) });
            }
        }
    }

    /// Reads the answer to a challenge.
    fn hear(&mut self, client: &mut Client, nonce: [u8; 32]) -> Step {
        // One byte more than a frame tells a longer packet, whose rest the kernel discards.
        let mut bytes = [0; FRAME_BYTES + 1];
        let count = match recv(&client.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Step::Refuse(None, "it left without an answer"),
            Ok((count, _)) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Step::Stay,
            Err(_) => return Step::Refuse(None, "its connection broke"),
        };
        let Some(answer) = Frame::decode(&bytes[..count]).filter(|frame| frame.kind == Kind::Answer) else {
            return Step::Refuse(None, "it sent something that is no answer");
        };
        let rank = answer.number;
        let proof = join_proof(&self.key, &nonce, self.job, rank);
        // The hash compares in constant time; the job's identity is no secret.
        if proof != blake3::Hash::from_bytes(answer.proof) || answer.job != *self.job.as_bytes() {
            return Step::Refuse(Some(Why::Proof), "it does not know the job's key");
        }
        match self.offers.remove(&rank) {
            Some(Offer::Free(bell)) => {
                self.offers.insert(rank, Offer::Promised(bell));
            }
            Some(other) => {
                self.offers.insert(rank, other);
                return Step::Refuse(Some(Why::Taken), "its rank is taken");
            }
            None => return Step::Refuse(Some(Why::Taken), "its rank is not for the broker to give"),
        }
        client.stage = Stage::Giving { rank, next: 0 };
        let mut welcome = Frame::new(Kind::Welcome);
        welcome.proof = *welcome_proof(&self.key, &answer.nonce, &nonce, self.job, rank).as_bytes();
        match send(&client.socket, &welcome, &[]) {
            Ok(()) => self.give(client, rank, 0),
            Err(_) => Step::Refuse(None, "its connection broke"),
        }
    }

    /// Sends as many descriptors as the socket takes: the ring, then the arena, and the doorbell last of all.
    fn give(&mut self, client: &mut Client, rank: u32, next: usize) -> Step {
        let (Some(shared), Some(Offer::Promised(bell))) = (&self.shared, self.offers.get(&rank)) else {
            return Step::Refuse(None, "there is nothing left to give");
        };
        let all: Vec<BorrowedFd<'_>> =
            shared.ring.iter().chain([&shared.arena, bell]).map(OwnedFd::as_fd).collect();
        let mut next = next;
        for parcel in all[next..].chunks(PARCEL) {
            let mut frame = Frame::new(Kind::Parcel);
            frame.code = parcel.len() as u8;
            frame.number = next as u32;
            match send_in_turn(&client.socket, &frame, parcel) {
                Ok(()) => next += parcel.len(),
                Err(Errno::AGAIN) => {
                    client.stage = Stage::Giving { rank, next };
                    return Step::Stay;
                }
                Err(_) => return Step::Refuse(None, "its connection broke"),
            }
        }
        // With the doorbell's read end on its way, our copy would only hide the rank's death.
        self.offers.insert(rank, Offer::Taken);
        tracing::debug!(rank, "handed out");
        Step::Leave
    }

    /// Offers a rank again whose client went away half way.
    fn take_back(&mut self, rank: u32) {
        if let Some(offer) = self.offers.get_mut(&rank)
            && let Offer::Promised(bell) = std::mem::replace(offer, Offer::Taken)
        {
            *offer = Offer::Free(bell);
        }
    }

    fn refuse(&mut self, socket: &OwnedFd, why: Option<Why>, reason: &'static str) {
        if let Some(left_out) = self.log.line(Instant::now()) {
            tracing::warn!(reason, left_out, "the broker refused a client");
        }
        if let Some(why) = why {
            let mut refusal = Frame::new(Kind::Refusal);
            refusal.code = why as u8;
            // Whoever does not read it finds the connection closed.
            let _ = send(socket, &refusal, &[]);
        }
    }
}

/// Sends a frame with descriptors, without waiting.
/// As [`send`], once others of this user have taken up some of the descriptors that are on their way to them: of those there
/// may be only so many as a process may have open.
fn send_in_turn(socket: &OwnedFd, frame: &Frame, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let until = Instant::now() + CROWDED;
    loop {
        match send(socket, frame, fds) {
            Err(Errno::TOOMANYREFS) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            sent => return sent,
        }
    }
}

fn send(socket: &OwnedFd, frame: &Frame, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PARCEL))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let bytes = frame.encode();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    // A packet socket takes all of a frame or nothing.
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).map(|_| ())
}
