//! Options of a connection's socket.

use crate::config::{Limits, Times};
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// Keep-alive times are counted in whole seconds by some systems.
const SECOND: Duration = Duration::from_secs(1);

/// Makes the socket what a port wants: no delays, no blocking, and an end if the other host vanishes.
pub(crate) fn prepare(stream: &TcpStream, times: &Times, limits: &Limits) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let socket = SockRef::from(stream);
    if let Some(bytes) = limits.socket_buffers {
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)?;
    }
    if !times.silence.is_zero() {
        let third = (times.silence / 3).max(SECOND);
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
            let probes = (times.silence - times.silence / 3).as_secs().clamp(1, 100) as u32 + 1;
            let keepalive = keepalive.with_interval(SECOND);
            #[cfg(not(windows))]
            let keepalive = keepalive.with_retries(probes);
            keepalive
        };
        socket.set_tcp_keepalive(&keepalive)?;
    }
    Ok(())
}
