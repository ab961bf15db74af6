//! Connecting to a peer: a task per connection, off the hot path.

use crate::config::Limits;
use crate::handshake::{ANSWER_LEN, Channel, HandshakeError, Initiator, VERDICT_LEN, Verdict};
use crate::hub::{Hub, Settled};
use crate::socket;
use posthaste_core::{ContextId, Endpoint, Fault, LossCause};
use std::io;
use std::net::{SocketAddr, TcpStream as Socket};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep, timeout, timeout_at};

const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Why one attempt came to nothing.
#[derive(Debug, thiserror::Error)]
enum AttemptError {
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A listener that does not like a hello closes without a word.
    #[error("the listener ended the handshake: another key, job, version or mode, or it is overrun")]
    Refused,
    #[error("{0}")]
    Handshake(#[from] HandshakeError),
    #[error("it is not wanted any more")]
    GivenUp,
}

impl AttemptError {
    /// Whether the system says that nobody listens there.
    fn is_refusal(&self) -> bool {
        matches!(self, AttemptError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// Whether this process, or the system, has no descriptor left.
    fn is_exhaustion(&self) -> bool {
        #[cfg(unix)]
        let out = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(|errno| errno.raw_os_error());
        #[cfg(not(unix))]
        let out: [i32; 0] = [];
        let AttemptError::Io(error) = self else { return false };
        error.raw_os_error().is_some_and(|code| out.contains(&code))
    }
}

/// Connects a context with an endpoint, trying again until it is settled one way or the other, or the time is up.
pub(crate) async fn dial(hub: Arc<Hub>, context: ContextId, peer: Endpoint, number: u64) {
    let deadline = Instant::now() + hub.times.connect;
    let mut pause = FIRST_PAUSE;
    let mut last = None;
    while hub.is_dialing(context, peer, number) {
        match timeout_at(deadline, round(&hub, context, peer, number)).await {
            Ok(Ok(Round { verdict: Verdict::Accept, incarnation, stream, channel })) => {
                posthaste_core::failpoint!("tcp.dial.accepted");
                if hub.accepted(context, peer, number) {
                    hub.deliver(context, Settled { peer, incarnation, stream: Arc::new(stream), channel });
                }
                return;
            }
            // Its own attempt is on the way, and ends this one. If it does not arrive, this side tries again.
            Ok(Ok(Round { verdict: Verdict::Yield, .. })) => {}
            Ok(Ok(Round { verdict: Verdict::Spent, .. })) => {
                return over(&hub, context, peer, number, Fault::PeerLost(peer.rank));
            }
            Ok(Ok(Round { verdict: Verdict::Leaving, .. })) => {
                return over(&hub, context, peer, number, Fault::PeerClosed(peer.rank));
            }
            // The rank was started again meanwhile: whoever wants that one makes an attempt of its own.
            Ok(Err(AttemptError::GivenUp)) => return,
            // A closed port is a proof that nobody is there any more; who leaves hears no other news of that.
            Ok(Err(error)) if hub.is_closing() && error.is_refusal() => {
                return over(&hub, context, peer, number, Fault::PeerClosed(peer.rank));
            }
            Ok(Err(error)) => {
                if let Some(more) = hub.log.pass() {
                    if error.is_exhaustion() {
                        let remedy = "raise the limit of open files (RLIMIT_NOFILE, `ulimit -n`)";
                        tracing::error!(me = %hub.me, %peer, %error, more, "no descriptor to connect with; {remedy}");
                    } else {
                        tracing::debug!(me = %hub.me, %peer, %error, more, "connecting failed; trying again");
                    }
                }
                last = Some(error);
            }
            Err(_) => {
                let why = last.map_or_else(|| "it did not answer".to_owned(), |error| error.to_string());
                tracing::warn!(me = %hub.me, %peer, %why, "could not connect in time");
                return over(&hub, context, peer, number, Fault::PeerLost(peer.rank));
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn over(hub: &Hub, context: ContextId, peer: Endpoint, number: u64, fault: Fault) {
    let incarnation = hub.incarnation_of(peer.rank);
    // The peer's own attempt may have been accepted meanwhile.
    if hub.is_dialing(context, peer, number) {
        hub.ended(context, peer, incarnation, fault, LossCause::Unreachable);
    }
}

/// What an attempt came to.
struct Round {
    verdict: Verdict,
    /// With whom.
    incarnation: u64,
    stream: Socket,
    channel: Channel,
}

async fn round(hub: &Hub, context: ContextId, peer: Endpoint, number: u64) -> Result<Round, AttemptError> {
    let target = hub.book.wait(peer.rank).await;
    // What is in the book may be of an incarnation that this attempt is not for.
    if !hub.is_dialing(context, peer, number) {
        return Err(AttemptError::GivenUp);
    }
    let shaken = async {
        let mut stream = connect(target.address, &hub.limits).await?;
        stream.set_nodelay(true)?;
        posthaste_core::failpoint!("tcp.dial.connected");
        let (initiator, hello) = Initiator::hello(&hub.identity, context, peer, target.incarnation)?;
        stream.write_all(&hello).await?;
        posthaste_core::failpoint!("tcp.dial.claimed");
        let mut answer = [0; ANSWER_LEN];
        read(&mut stream, &mut answer).await?;
        let (channel, finish) = initiator.answered(&answer)?;
        stream.write_all(&finish).await?;
        posthaste_core::failpoint!("tcp.dial.proven");
        Ok::<_, AttemptError>((stream, channel))
    };
    let late = |_| AttemptError::Io(io::ErrorKind::TimedOut.into());
    let (mut stream, mut channel) = timeout(hub.times.handshake, shaken).await.map_err(late)??;
    // From here on the peer may count the connection as that of the pair, which is made once: it is not given up for another.
    let mut verdict = [0; VERDICT_LEN];
    read(&mut stream, &mut verdict).await?;
    let verdict = channel.heard(&verdict)?;
    let stream = stream.into_std()?;
    socket::prepare(&stream, &hub.times, &hub.limits)?;
    let channel = channel.settled(hub.identity.mode());
    Ok(Round { verdict, incarnation: target.incarnation, stream, channel })
}

async fn connect(address: SocketAddr, limits: &Limits) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket::unpaced((&socket).into(), address.ip());
    socket::fitted((&socket).into(), limits);
    socket.connect(address).await
}

async fn read(stream: &mut TcpStream, into: &mut [u8]) -> Result<(), AttemptError> {
    match stream.read_exact(into).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(AttemptError::Refused),
        Err(error) => Err(error.into()),
    }
}
