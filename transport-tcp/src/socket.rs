//! Options of a connection's socket.

use crate::config::{Limits, Times};
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::net::{IpAddr, TcpStream};
use std::time::Duration;

/// Keep-alive times are counted in whole seconds by some systems.
const SECOND: Duration = Duration::from_secs(1);

/// The congestion control that every system has which lets it be chosen, and that sets no timers.
#[cfg(target_os = "linux")]
const PLAIN: &[u8] = b"reno";
#[cfg(target_os = "freebsd")]
const PLAIN: &[u8] = b"newreno";

/// What systems take as the time before a connection is probed, at most.
const LONGEST_PROBE: Duration = Duration::from_secs(32_767);

/// Beyond it, and below, a system may refuse to limit segments.
#[cfg(unix)]
const LONGEST_SEGMENT: usize = 32 << 10;
#[cfg(unix)]
const SHORTEST_SEGMENT: usize = 536;

/// Makes the socket what a port wants: no delays, no blocking, and an end if the other host vanishes.
pub(crate) fn prepare(stream: &TcpStream, times: &Times, limits: &Limits) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let socket = SockRef::from(stream);
    if let Some(bytes) = limits.socket_buffers {
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)?;
    }
    watched(socket, times)
}

/// Has the system look whether the other host still answers.
pub(crate) fn watched(socket: SockRef<'_>, times: &Times) -> io::Result<()> {
    if !times.silence.is_zero() {
        let third = (times.silence / 3).clamp(SECOND, LONGEST_PROBE);
        let keepalive = TcpKeepalive::new().with_time(third);
        #[cfg(any(
            target_os = "android",
            target_os = "freebsd",
            target_os = "ios",
            target_os = "linux",
            target_os = "macos",
            target_os = "netbsd",
            windows
        ))]
        let keepalive = {
            // Where nothing else watches, so many unanswered probes are the end.
            #[cfg(not(windows))]
            let (interval, probes) = probes(times.silence.saturating_sub(third));
            #[cfg(windows)]
            let interval = SECOND;
            let keepalive = keepalive.with_interval(interval);
            #[cfg(not(windows))]
            let keepalive = keepalive.with_retries(probes);
            keepalive
        };
        socket.set_tcp_keepalive(&keepalive)?;
        // Keep-alive does not probe while something waits for room at the other side; the persist timer does.
        #[cfg(unix)]
        if !posthaste_core::reactor::look_at_least(&*socket, third) {
            tracing::debug!(
                "the end of a host that had no room may be noticed late: this system has no TCP_RTO_MAX_MS"
            );
        }
    }
    Ok(())
}

/// How far apart, and how many, probes are of which the last is past that time: no more than kernels allow, and not more often than
/// once a second. What is longer than they can tell ends when all they can is unanswered, which is five weeks.
#[cfg(not(windows))]
fn probes(time: Duration) -> (Duration, u32) {
    const MOST: u32 = 100;
    let longest = LONGEST_PROBE.as_secs();
    let seconds = time.as_secs().max(1).saturating_add(1).min(longest * u64::from(MOST));
    let interval = seconds.div_ceil(u64::from(MOST));
    (Duration::from_secs(interval), seconds.div_ceil(interval) as u32 + 1)
}

/// Chooses, before a socket connects or listens there, how it finds the pace of an address. Within a host nothing can be
/// congested, and algorithms that set a timer for each burst, such as BBR, take as much time for that as for the bytes.
pub(crate) fn unpaced(socket: SockRef<'_>, address: IpAddr) {
    #[cfg(any(target_os = "freebsd", target_os = "linux"))]
    if address.is_loopback()
        && let Err(error) = socket.set_tcp_congestion(PLAIN)
    {
        // What the system would choose does, too.
        tracing::debug!(%error, "the system's congestion control stays");
    }
    #[cfg(not(any(target_os = "freebsd", target_os = "linux")))]
    let _ = (socket, address);
}

/// Says, before a socket connects or listens, that segments are to fit into small buffers: a kernel that has something for
/// a whole segment sends no part of it to a window that is smaller, until its persist timer has run out, which takes a
/// fifth of a second. Within a host segments are of 32 KiB and more.
pub(crate) fn fitted(socket: SockRef<'_>, limits: &Limits) {
    #[cfg(unix)]
    if let Some(bytes) = limits.socket_buffers.filter(|bytes| *bytes < 2 * LONGEST_SEGMENT)
        && let Err(error) = socket.set_tcp_mss((bytes / 2).max(SHORTEST_SEGMENT) as u32)
    {
        // It is slow then.
        tracing::debug!(%error, "segments stay as long as they are");
    }
    #[cfg(not(unix))]
    let _ = (socket, limits);
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};

    #[test]
    #[cfg(not(windows))]
    fn probes_last_as_long_as_they_should_whatever_that_is() {
        for seconds in [0, 1, 3, 66, 99, 100, 101, 400, 3600, 1_000_000] {
            let (interval, count) = probes(Duration::from_secs(seconds));
            assert!(interval >= SECOND && (2..=101).contains(&count), "{count} times {interval:?}");
            // All of them unanswered are the end, and that is not before the time.
            let all = interval * (count - 1);
            assert!(all > Duration::from_secs(seconds), "{all:?} for {seconds} s");
            assert!(all <= Duration::from_secs(seconds + seconds / 50 + 2), "{all:?} for {seconds} s");
        }
        // Nor is a kernel asked for what it refuses.
        for silence in [SECOND, Duration::from_secs(4_000_000), Duration::MAX] {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
            let times = Times { silence, ..Times::default() }.checked();
            watched((&socket).into(), &times).unwrap_or_else(|error| panic!("{silence:?}: {error}"));
        }
    }

    #[test]
    fn only_within_the_host_the_pace_is_not_the_systems() {
        let fresh = || Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let control = |socket: &Socket| socket.tcp_congestion().expect("it has one");
        let usual = control(&fresh());
        for (address, is_plain) in
            [("127.0.0.1", true), ("127.3.2.1", true), ("::1", true), ("192.0.2.1", false)]
        {
            let socket = fresh();
            unpaced((&socket).into(), address.parse().expect("an address"));
            let now = control(&socket);
            if is_plain {
                assert!(now.starts_with(PLAIN), "{address}: {now:?}");
            } else {
                assert_eq!(now, usual, "{address}");
            }
        }
        // What a listener accepts, and what connects, is born with it.
        let listener = fresh();
        unpaced((&listener).into(), "127.0.0.1".parse().expect("an address"));
        listener.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
        listener.listen(1).expect("it listens");
        let near = fresh();
        near.connect(&listener.local_addr().expect("it has one")).expect("it is accepted");
        let (far, _) = listener.accept().expect("it is there");
        assert!(control(&far).starts_with(PLAIN));
        assert_eq!(control(&near), usual, "the other side chooses for itself");
    }

    #[test]
    fn segments_fit_into_small_buffers() {
        let segment = |buffers: Option<usize>| {
            let limits = Limits { socket_buffers: buffers, ..Limits::default() };
            let fresh = || {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
                fitted((&socket).into(), &limits);
                socket
            };
            let listener = fresh();
            listener.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
            listener.listen(1).expect("it listens");
            let near = fresh();
            near.connect(&listener.local_addr().expect("it has one")).expect("it is accepted");
            let (far, _) = listener.accept().expect("it is there");
            [near, far].map(|socket| socket.tcp_mss().expect("it has one") as usize)
        };
        let usual = segment(None);
        // A window is less than its buffer.
        for bytes in [1, 4096, 20_000] {
            assert!(segment(Some(bytes)).iter().all(|len| *len <= (bytes / 2).max(536)), "{bytes}");
        }
        for bytes in [64 << 10, 4 << 20] {
            assert_eq!(segment(Some(bytes)), usual, "{bytes}");
        }
    }
}
