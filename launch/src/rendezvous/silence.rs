//! Noticing that the host at the other end has vanished without a word.

use std::io;
use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

/// An idle connection is probed after so long, and then every second.
const IDLE: Duration = Duration::from_secs(2);
const PROBE: Duration = Duration::from_secs(1);
/// Probes without an answer after which the other host is gone.
const PROBES: u32 = 3;
/// What was sent and is not acknowledged for so long: the same. Where this is set the kernel goes by it, and not by the number of
/// probes, for idle connections, too (tcp(7)); so it is as long as those take. A process that is stopped for longer has room for
/// hundreds of news meanwhile.
#[cfg(any(target_os = "linux", target_os = "android"))]
const UNACKNOWLEDGED: Duration = IDLE.saturating_add(PROBE.saturating_mul(PROBES));

/// Has the kernel end the connection when the other host does not answer any more. Hosts answer for their processes: a
/// rank that computes or is stopped is not taken for gone.
pub(crate) fn notice_silence(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, IDLE)?;
    sockopt::set_tcp_keepintvl(stream, PROBE)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED.as_millis() as u32)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_connection_is_probed_when_it_is_idle() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(!sockopt::socket_keepalive(&stream).unwrap());
        notice_silence(&stream).unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let (idle, probe) = (sockopt::tcp_keepidle(&stream), sockopt::tcp_keepintvl(&stream));
        assert_eq!((idle.unwrap(), probe.unwrap()), (IDLE, PROBE));
        // Five seconds, as is promised: by whichever of the two the kernel goes.
        let by_probes = IDLE + PROBE * sockopt::tcp_keepcnt(&stream).unwrap();
        assert_eq!(by_probes, Duration::from_secs(5));
        #[cfg(any(target_os = "linux", target_os = "android"))]
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 5000);
    }
}
