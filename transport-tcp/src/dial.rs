//! Connecting to a peer: a task per connection, off the hot path.

use crate::config::{Limits, Times};
use crate::handshake::{ANSWER_LEN, Channel, HandshakeError, Initiator, VERDICT_LEN, Verdict};
use crate::hub::{Hub, Settled};
use crate::socket;
use posthaste_core::{ContextId, Endpoint, Fault, LossCause};
use std::io;
use std::net::{SocketAddr, TcpStream as Socket};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Between two looks whether the host of a peer still answers that says nothing, if a handshake has no longer.
const SHORTEST: Duration = Duration::from_millis(20);

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
    /// The system connects, and the process says nothing, as one that is stopped.
    #[error("it does not answer")]
    Silent,
    #[error("it was not connected in time")]
    Late,
    #[error("it is not wanted any more")]
    GivenUp,
}

impl AttemptError {
    /// Whether the system says that nobody listens there.
    fn is_refusal(&self) -> bool {
        matches!(self, AttemptError::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// Whether the other side has ended the connection.
    fn is_end(&self) -> bool {
        match self {
            AttemptError::Refused => true,
            AttemptError::Io(error) => error.kind() == io::ErrorKind::ConnectionReset,
            _ => false,
        }
    }

    /// What a peer is lost by if it cannot be connected to because of this.
    fn cause(&self) -> LossCause {
        #[cfg(unix)]
        if let AttemptError::Io(error) = self {
            use rustix::io::Errno;
            use rustix::process::{Resource, getrlimit};
            match Errno::from_io_error(error) {
                Some(Errno::MFILE) => return LossCause::NoDescriptor(getrlimit(Resource::Nofile).current),
                Some(Errno::NFILE) => return LossCause::NoDescriptor(None),
                _ => {}
            }
        }
        LossCause::Unreachable
    }

    /// Says that it is tried again, not more often than is worth reading.
    fn tell(&self, hub: &Hub, peer: Endpoint) {
        let me = hub.me;
        match self.cause() {
            why @ LossCause::NoDescriptor(_) => {
                if let Some(more) = hub.lacking.pass() {
                    tracing::error!(%me, %peer, more, "connecting failed; trying again: {why}");
                }
            }
            _ => tracing::debug!(%me, %peer, error = %self, "connecting failed; trying again"),
        }
    }
}

/// Connects a context with an endpoint, trying again until it is settled one way or the other, or the time is up.
pub(crate) async fn dial(hub: Arc<Hub>, context: ContextId, peer: Endpoint, number: u64) {
    let mut deadline = Instant::now() + hub.times.connect;
    let mut pause = FIRST_PAUSE;
    // Whoever is waited for anew is to be tried again within that time.
    let longest = LONGEST_PAUSE.min(hub.times.connect / 4);
    let mut last = None;
    let unreachable = LossCause::Unreachable;
    let fail = |fault, cause| hub.attempt_failed(context, peer, number, fault, cause);
    while hub.is_dialing(context, peer, number) {
        // Whether the last attempt has shown that the peer is there.
        let mut lives = false;
        match round(&hub, context, peer, number, deadline).await {
            Ok(Round { verdict: Verdict::Accept, incarnation, stream, channel }) => {
                posthaste_core::failpoint!("tcp.dial.accepted");
                if hub.accepted(context, peer, number) {
                    hub.deliver(context, Settled { peer, incarnation, stream: Arc::new(stream), channel });
                }
                return;
            }
            // Its own attempt is on the way, and ends this one. If it does not arrive, this side tries again.
            Ok(Round { verdict: Verdict::Yield, .. }) => hub.yielded(context, peer, number),
            // As of one that is stopped: whoever lives may go on at any time. Who leaves waits no longer than for one that says nothing of
            // itself, or two could wait for each other.
            Ok(Round { verdict: Verdict::Wait, .. }) => {
                hub.yielded(context, peer, number);
                lives = !hub.is_closing();
            }
            Ok(Round { verdict: Verdict::Spent, .. }) => {
                return fail(Fault::PeerLost(peer.rank), unreachable);
            }
            Ok(Round { verdict: Verdict::Leaving, .. }) => {
                return fail(Fault::PeerClosed(peer.rank), unreachable);
            }
            // The rank was started again meanwhile: whoever wants that one makes an attempt of its own.
            Err(AttemptError::GivenUp) => return,
            // A closed port is a proof that nobody is there any more; who leaves hears no other news of that, and of a rank that has
            // left there are none.
            // Nor does one say anything whose port is still there, though nobody takes what comes to it.
            Err(error)
                if (error.is_refusal() && hub.is_closing())
                    || ((error.is_refusal() || matches!(error, AttemptError::Silent))
                        && hub.has_left(peer.rank)) =>
            {
                return fail(Fault::PeerClosed(peer.rank), unreachable);
            }
            Err(error) => {
                error.tell(&hub, peer);
                // A process that ends takes its port with it: one that is stopped may go on.
                lives = matches!(error, AttemptError::Silent);
                // Of those who wait without end, what they waited for before says more.
                let why = match error {
                    AttemptError::Late => last.take().unwrap_or(error),
                    error => error,
                };
                if !lives && Instant::now() >= deadline {
                    let cause = why.cause();
                    tracing::warn!(me = %hub.me, %peer, %why, "could not connect in time: {cause}");
                    return fail(Fault::PeerLost(peer.rank), cause);
                }
                last = Some(why);
            }
        }
        let next = Instant::now() + pause;
        if lives {
            sleep_until(next).await;
            // From when it is tried again, however late this is woken.
            deadline = Instant::now() + hub.times.connect;
        } else {
            sleep_until(deadline.min(next)).await;
        }
        pause = (pause * 2).min(longest);
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

async fn round(
    hub: &Hub,
    context: ContextId,
    peer: Endpoint,
    number: u64,
    deadline: Instant,
) -> Result<Round, AttemptError> {
    let target = timeout_at(deadline, hub.book.wait(peer.rank)).await.map_err(|_| AttemptError::Late)?;
    // What is in the book may be of an incarnation that this attempt is not for.
    if !hub.is_dialing(context, peer, number) {
        return Err(AttemptError::GivenUp);
    }
    let soon = deadline.min(Instant::now() + hub.times.handshake);
    let connected = timeout_at(soon, connect(target.address, &hub.limits)).await;
    let mut stream = connected.map_err(|_| AttemptError::Late)??;
    let shaken = async move {
        stream.set_nodelay(true)?;
        posthaste_core::failpoint!("tcp.dial.connected");
        let (initiator, hello) =
            Initiator::hello(&hub.identity, context, peer, target.incarnation, hub.is_closing())?;
        stream.write_all(&hello).await?;
        posthaste_core::failpoint!("tcp.dial.claimed");
        let mut answer = [0; ANSWER_LEN];
        read(&mut stream, &mut answer).await?;
        let (channel, finish) = initiator.answered(&answer)?;
        if !hub.proves(context, peer, number) {
            return Err(AttemptError::GivenUp);
        }
        stream.write_all(&finish).await?;
        posthaste_core::failpoint!("tcp.dial.proven");
        Ok::<_, AttemptError>((stream, channel))
    };
    // All its time, though that of all attempts be over: who has less says nothing by not answering. Nor does whoever turns this side
    // away because that time was over: this side may have stood still.
    let began = Instant::now();
    let shaken = timeout(hub.times.handshake, shaken).await;
    let (mut stream, mut channel) = match shaken {
        Ok(Err(error)) if began.elapsed() >= hub.times.handshake && error.is_end() => {
            Err(AttemptError::Silent)
        }
        Ok(shaken) => shaken,
        Err(_) => Err(AttemptError::Silent),
    }?;
    // From here on the peer may count the connection as that of the pair, which is made once: it is not given up for another, as long
    // as the peer's host answers.
    socket::watched((&stream).into(), &hub.times)?;
    let last = deadline.max(Instant::now() + hub.times.handshake);
    let wanted = || hub.is_dialing(context, peer, number);
    let verdict = hear(&mut stream, &hub.times, last, wanted).await?;
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

/// Waits for the verdict of a peer that has proven what it is: as long as the attempt is wanted and the peer's host answers, since
/// the peer may be stopped. Where the system does not tell, another attempt finds out when the time is up.
async fn hear(
    stream: &mut TcpStream,
    times: &Times,
    last: Instant,
    wanted: impl Fn() -> bool,
) -> Result<[u8; VERDICT_LEN], AttemptError> {
    let mut verdict = [0; VERDICT_LEN];
    let (mut reading, socket) = stream.split();
    {
        let mut heard = std::pin::pin!(read(&mut reading, &mut verdict));
        let began = Instant::now();
        loop {
            let time = times.handshake.max(SHORTEST);
            match timeout(time, heard.as_mut()).await {
                Ok(Ok(())) => break,
                // It was stopped, and found that the time for a handshake was over when it went on, if it did. This side may have
                // stood still, too, and see the end before it sees how late it is.
                Ok(Err(error)) if began.elapsed() >= time && error.is_end() => {
                    return Err(AttemptError::Silent);
                }
                Ok(Err(error)) => return Err(error),
                Err(_) if !wanted() => return Err(AttemptError::GivenUp),
                Err(_) => {}
            }
            match answers(socket.as_ref(), times) {
                Some(true) => {}
                Some(false) => return Err(AttemptError::Late),
                None if Instant::now() < last => {}
                None => return Err(AttemptError::Silent),
            }
        }
    }
    Ok(verdict)
}

/// Whether the other host of a connection still answers, if the system tells.
fn answers(stream: &TcpStream, times: &Times) -> Option<bool> {
    #[cfg(all(unix, not(feature = "portable")))]
    {
        let hearing = posthaste_core::reactor::hear(stream)?;
        Some(times.silence.is_zero() || !hearing.unanswered || hearing.last < times.silence)
    }
    #[cfg(not(all(unix, not(feature = "portable"))))]
    {
        let _ = (stream, times);
        None
    }
}

async fn read(stream: &mut (impl AsyncRead + Unpin), into: &mut [u8]) -> Result<(), AttemptError> {
    match stream.read_exact(into).await {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(AttemptError::Refused),
        Err(error) => Err(error.into()),
    }
}
