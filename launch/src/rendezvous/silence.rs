//! Noticing that the host at the other end has vanished without a word.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

/// Kernels count in seconds, and allow no longer ones than this.
const SECOND: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(32_767);

/// A host is silent for so long at least before it is lost: what many ranks are told at a time, one that is stopped or busy has no
/// room for, and to the kernel that is silence, too.
const LEAST: Duration = Duration::from_secs(5);
/// What is as good as never.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// After how much silence a host is lost where ranks meet, of what is set: there zero says never.
pub(crate) fn borne(silence: Duration) -> Duration {
    if silence.is_zero() { NEVER } else { silence.clamp(LEAST, NEVER) }
}

/// Has the kernel end the connection when the other host has not answered for so long. Hosts answer for their processes: a rank
/// that computes or is stopped is not taken for gone.
pub(crate) fn notice_silence(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    let (idle, probe, probes) = probes(silence);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, idle)?;
    sockopt::set_tcp_keepintvl(stream, probe)?;
    sockopt::set_tcp_keepcnt(stream, probes)?;
    // What was sent and is not acknowledged for so long: the same. Where this is set the kernel goes by it, and not by the number of
    // probes, for idle connections, too (tcp(7)). A process that is stopped for longer has room for hundreds of news meanwhile.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    sockopt::set_tcp_user_timeout(stream, silence.as_millis().clamp(1, i32::MAX as u128) as u32)?;
    Ok(())
}

/// After how much idleness a connection is probed, how far apart the probes are and how many remain without an answer when that much
/// silence is over: two fifths of it, and a fifth each.
fn probes(silence: Duration) -> (Duration, Duration, u32) {
    let fifth = silence.as_millis().div_ceil(5000) as u64;
    let seconds = |seconds: u64| Duration::from_secs(seconds).clamp(SECOND, LONGEST);
    (seconds(2 * fifth), seconds(fifth), 3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_connection_is_probed_as_is_set() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for (silence, probed) in [(5, (2, 1)), (9, (4, 2)), (60, (24, 12)), (4_000_000, (32_767, 32_767))] {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            assert!(!sockopt::socket_keepalive(&stream).unwrap());
            notice_silence(&stream, Duration::from_secs(silence)).unwrap();
            assert!(sockopt::socket_keepalive(&stream).unwrap());
            let (idle, probe) = (sockopt::tcp_keepidle(&stream), sockopt::tcp_keepintvl(&stream));
            assert_eq!((idle.unwrap().as_secs(), probe.unwrap().as_secs()), probed);
            assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), 3);
            // By whichever of the two the kernel goes.
            #[cfg(any(target_os = "linux", target_os = "android"))]
            assert_eq!(
                u64::from(sockopt::tcp_user_timeout(&stream).unwrap()),
                (silence * 1000).min(i32::MAX as u64)
            );
        }
    }

    #[test]
    fn what_is_set_is_borne_within_bounds() {
        let borne = |seconds| borne(Duration::from_secs(seconds)).as_secs();
        assert_eq!([1, 5, 6, 3600, u64::MAX].map(borne), [5, 5, 6, 3600, NEVER.as_secs()]);
        assert_eq!(borne(0), NEVER.as_secs(), "never");
    }
}
