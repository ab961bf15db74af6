//! Gets a rank's descriptors from the launcher's broker.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use rustix::process::{Resource, geteuid, getrlimit};

use crate::env::JobEnv;
use crate::error::BrokerError;
use crate::fds::room_for;
use crate::frame::{FRAME_BYTES, Frame, Kind, PARCEL, Why, join_proof, welcome_proof};
use crate::inherited::InheritedFds;
use crate::key::fill_random;

/// How long to try in all.
const PATIENCE: Duration = Duration::from_secs(10);
/// Whoever has stood still for so long may have been turned away for that, and comes again.
const SLOW: Duration = Duration::from_secs(1);

/// Joins as the rank that the environment names, over the launcher's broker.
///
/// Both sides prove that they know the job's key. Blocks for up to ten seconds: while the broker is kept busy by
/// clients that prove nothing, it tries again.
///
/// # Errors
/// There is no broker, it or we belong to another user, a proof is refused, the rank is taken, or this process may not
/// hold as many descriptors.
pub fn fetch_from_broker(env: &JobEnv) -> Result<InheritedFds, BrokerError> {
    let name = env.broker.as_deref().ok_or(BrokerError::NoBroker)?;
    // Found out before the broker gives the rank away for good; besides the parcels there is the socket.
    let needed = u64::from(env.size) + 3;
    if let Err((needed, limit)) = room_for(needed) {
        return Err(BrokerError::DescriptorLimit { needed, limit });
    }
    let until = Instant::now() + PATIENCE;
    let mut pause = Duration::from_millis(5);
    loop {
        let began = Instant::now();
        let fetched = fetch_once(env, name, until);
        let again = match &fetched {
            Err(BrokerError::Busy) => true,
            Err(BrokerError::Protocol(_)) => began.elapsed() >= SLOW,
            _ => false,
        };
        match fetched {
            Err(_) if again && Instant::now() + pause < until => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(200));
            }
            result => return result,
        }
    }
}

fn fetch_once(env: &JobEnv, name: &str, until: Instant) -> Result<InheritedFds, BrokerError> {
    let broker = Connection::open(name, until)?;
    let challenge = broker.receive(None)?;
    expect(&challenge, Kind::Challenge)?;

    let mut answer = Frame::new(Kind::Answer);
    answer.number = env.rank;
    answer.job = *env.job.as_bytes();
    fill_random(&mut answer.nonce).map_err(system("draw a challenge"))?;
    answer.proof = *join_proof(&env.key, &challenge.nonce, env.job, env.rank).as_bytes();
    broker.send(&answer)?;

    let welcome = broker.receive(None)?;
    if let Some(why) = refusal(&welcome) {
        return Err(match why {
            Why::Taken => BrokerError::RankTaken { rank: env.rank },
            Why::Busy => BrokerError::Busy,
            Why::Proof => BrokerError::Refused,
        });
    }
    expect(&welcome, Kind::Welcome)?;
    let proof = welcome_proof(&env.key, &answer.nonce, &challenge.nonce, env.job, env.rank);
    if proof != blake3::Hash::from_bytes(welcome.proof) {
        return Err(BrokerError::Refused);
    }

    let needed = env.size as usize + 2;
    let mut fds = Vec::with_capacity(needed);
    while fds.len() < needed {
        let before = fds.len();
        let parcel = broker.receive(Some(&mut fds))?;
        expect(&parcel, Kind::Parcel)?;
        let came = fds.len() - before;
        if came == 0 || fds.len() > needed || parcel.number as usize != before {
            return Err(BrokerError::Protocol("a parcel has another content than announced"));
        }
        if came != usize::from(parcel.code) {
            return Err(truncated(needed));
        }
    }
    let (Some(bell), Some(arena)) = (fds.pop(), fds.pop()) else {
        return Err(BrokerError::Protocol("descriptors are missing"));
    };
    let fds = InheritedFds { arena, bell, ring: fds };
    fds.verify(env.rank)?;
    Ok(fds)
}

/// A connection to a broker of our own user.
struct Connection {
    socket: OwnedFd,
    until: Instant,
}

impl Connection {
    fn open(name: &str, until: Instant) -> Result<Self, BrokerError> {
        let what = "make a socket";
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)
            .map_err(system(what))?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
            .map_err(io::Error::from)
            .map_err(system(what))?;
        let connection = Self { socket, until };
        connection.limit(Timeout::Send)?;
        connect(&connection.socket, &address).map_err(|errno| match errno {
            // The queue of those who want to connect stayed full.
            Errno::AGAIN | Errno::TIMEDOUT => BrokerError::Busy,
            _ => BrokerError::Unreachable { name: name.to_owned(), source: errno.into() },
        })?;
        let peer = sockopt::socket_peercred(&connection.socket)
            .map_err(io::Error::from)
            .map_err(system("learn the broker's user"))?;
        if peer.uid != geteuid() {
            return Err(BrokerError::WrongUser { found: peer.uid.as_raw(), own: geteuid().as_raw() });
        }
        Ok(connection)
    }

    /// Lets the socket's next call wait for no longer than is left.
    fn limit(&self, which: Timeout) -> Result<(), BrokerError> {
        // Zero would mean for ever.
        let left = self.until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        sockopt::set_socket_timeout(&self.socket, which, Some(left))
            .map_err(io::Error::from)
            .map_err(system("limit the wait for the broker"))
    }

    fn send(&self, frame: &Frame) -> Result<(), BrokerError> {
        self.limit(Timeout::Send)?;
        match send(&self.socket, &frame.encode(), SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(Errno::AGAIN) => Err(BrokerError::Busy),
            Err(_) => Err(BrokerError::Protocol("it closed the connection before the answer")),
        }
    }

    /// Receives one frame, and its descriptors if any are wanted; any that are not wanted are closed.
    fn receive(&self, fds: Option<&mut Vec<OwnedFd>>) -> Result<Frame, BrokerError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PARCEL))];
        let mut bytes = [0; FRAME_BYTES + 1];
        let (received, came) = loop {
            self.limit(Timeout::Recv)?;
            let mut control = RecvAncillaryBuffer::new(&mut space);
            match recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(received) => {
                    let rights = control.drain().filter_map(|message| match message {
                        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
                        _ => None,
                    });
                    break (received, rights.flatten().collect::<Vec<OwnedFd>>());
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(BrokerError::Protocol("it went silent")),
                Err(Errno::CONNRESET) => return Err(BrokerError::Protocol("it closed the connection")),
                Err(errno) => return Err(system("receive from the broker")(errno.into())),
            }
        };
        if received.bytes == 0 {
            return Err(BrokerError::Protocol("it closed the connection"));
        }
        let frame = Frame::decode(&bytes[..received.bytes])
            .ok_or(BrokerError::Protocol("it sent something that is no frame"))?;
        if let Some(fds) = fds {
            if received.flags.contains(ReturnFlags::CTRUNC) {
                return Err(truncated(fds.capacity()));
            }
            fds.extend(came);
        }
        Ok(frame)
    }
}

fn refusal(frame: &Frame) -> Option<Why> {
    if frame.kind != Kind::Refusal {
        return None;
    }
    Some(match frame.code {
        code if code == Why::Busy as u8 => Why::Busy,
        code if code == Why::Taken as u8 => Why::Taken,
        _ => Why::Proof,
    })
}

fn expect(frame: &Frame, kind: Kind) -> Result<(), BrokerError> {
    match refusal(frame) {
        Some(Why::Busy) => Err(BrokerError::Busy),
        _ if frame.kind == kind => Ok(()),
        _ => Err(BrokerError::Protocol("it sent another frame than the one due")),
    }
}

/// The kernel dropped descriptors on the way, which it does where they do not fit.
fn truncated(needed: usize) -> BrokerError {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    BrokerError::DescriptorLimit { needed: needed as u64, limit }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> BrokerError {
    move |source| BrokerError::System { what, source }
}
