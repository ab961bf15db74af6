//! Descriptors in the runtime's reactor.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor that the result owns, for reading.
///
/// # Errors
/// If there is no runtime, or it refuses the descriptor.
///
/// # Panics
/// If the runtime has no I/O driver: Tokio tells that in no other way.
pub fn register(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(io::Error::other("not inside a Tokio runtime"));
    }
    // SAFETY: an `OwnedFd` is open as long as it lives, gives the same descriptor each time it is asked, and is
    // owned by the `AsyncFd`, which deregisters it before it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// A task whose end others see: if its runtime drops it instead, as one that ends does, something else is done before any of it is
/// dropped.
///
/// # Cancel safety
/// To be dropped is what it is for.
pub fn run_unless_dropped<T: Future<Output = ()>, F: FnOnce()>(
    task: T,
    dropped: F,
) -> RunUnlessDropped<T, F> {
    RunUnlessDropped { guard: Guard(Some(dropped)), task }
}

/// See [`run_unless_dropped`].
#[pin_project::pin_project]
#[must_use = "a future does nothing until it is awaited"]
pub struct RunUnlessDropped<T, F: FnOnce()> {
    /// Before the task: fields are dropped in their order.
    guard: Guard<F>,
    #[pin]
    task: T,
}

struct Guard<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for Guard<F> {
    fn drop(&mut self) {
        if let Some(dropped) = self.0.take() {
            dropped();
        }
    }
}

impl<T: Future<Output = ()>, F: FnOnce()> Future for RunUnlessDropped<T, F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        ready!(this.task.poll(cx));
        this.guard.0 = None;
        Poll::Ready(())
    }
}

/// Has it be an error of the write, and not the end of the process, that nobody reads a pipe or a connection any more. Rust's
/// runtime sees to that before `main`; where that is another language's, a peer that ends amid a message would take this process
/// with it. A handler that the program has installed by then stays. What this process executes instead of itself inherits it.
pub fn outlive_broken_pipes() {
    #[cfg(unix)]
    {
        // SAFETY: for a `sigaction` of zeros there is a meaning; the kernel reads and writes the one that is lent here, and is
        // given no handler to run.
        unsafe {
            let mut now: libc::sigaction = std::mem::zeroed();
            let known = libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut now) == 0;
            if known && now.sa_sigaction == libc::SIG_DFL {
                now.sa_sigaction = libc::SIG_IGN;
                // It cannot fail where asking did not.
                let _ignored = libc::sigaction(libc::SIGPIPE, &raw const now, std::ptr::null_mut());
            }
        }
    }
}

/// What a system knows of the other host of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hearing {
    /// Something was sent, data or a probe, to which that host has not answered.
    pub unanswered: bool,
    /// How long ago that host's last acknowledgement came.
    pub last: std::time::Duration,
    /// How long ago its last data came.
    pub said: std::time::Duration,
    /// How many segments have come from it, of whatever kind; it wraps around. Its own probes are among them, which are neither
    /// acknowledgements nor data. Always 0 before Linux 4.2.
    pub segments: u32,
    /// Something waits for room there, nothing is under way.
    pub waits: bool,
}

/// Has the system look at least so often whether the other host of a TCP connection still answers, however long nothing was
/// sent for want of room there, or nothing acknowledged. False where it cannot be told so: it looks ever more rarely then, at
/// last every two minutes.
pub fn look_at_least(socket: impl std::os::fd::AsFd, every: std::time::Duration) -> bool {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // Linux 6.15, `TCP_RTO_MAX_MS`.
        const LONGEST_PAUSE_MS: libc::c_int = 44;
        let every = every.as_millis().clamp(1_000, 120_000) as libc::c_int;
        let fd = socket.as_fd().as_raw_fd();
        // SAFETY: the descriptor is open as long as it is borrowed; the kernel reads one integer.
        let result = unsafe {
            libc::setsockopt(
                fd,
                libc::IPPROTO_TCP,
                LONGEST_PAUSE_MS,
                (&raw const every).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        result == 0
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (socket, every);
        false
    }
}

/// Whether this side has ended a TCP connection whose other host has yet to acknowledge that, or what was sent before. False where
/// the system does not tell.
#[must_use]
pub fn ends_unheard(socket: impl std::os::fd::AsFd) -> bool {
    #[cfg(target_os = "linux")]
    {
        // Linux: `TCP_FIN_WAIT1`, `TCP_LAST_ACK` and `TCP_CLOSING`.
        const UNHEARD: [u8; 3] = [4, 9, 11];
        info_of(socket).is_some_and(|info| UNHEARD.contains(&info.state))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = socket;
        false
    }
}

/// What the kernel tells of a TCP connection: the beginning of `struct tcp_info` of Linux, of which C libraries know less.
#[cfg(target_os = "linux")]
#[repr(C)]
#[derive(Default)]
struct TcpInfo {
    state: u8,
    _bytes: [u8; 2],
    probes: u8,
    _more_bytes: [u8; 4],
    _times: [u32; 4],
    unacked: u32,
    _counts: [u32; 6],
    last_data_recv: u32,
    last_ack_recv: u32,
    _sizes: [u32; 11],
    _totals: [u64; 4],
    _segs_out: u32,
    segs_in: u32,
    notsent_bytes: u32,
    _min_rtt: u32,
}

#[cfg(target_os = "linux")]
fn info_of(socket: impl std::os::fd::AsFd) -> Option<TcpInfo> {
    use std::os::fd::AsRawFd;
    let mut info = TcpInfo::default();
    let mut len = size_of::<TcpInfo>() as libc::socklen_t;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open as long as it is borrowed; the kernel writes at most len bytes to info, which is made of
    // integers.
    let result = unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    (result == 0).then_some(info)
}

/// Asks when the other host of a TCP connection was last heard of. Hosts answer for their processes, so that a process
/// that is stopped, or reads nothing, is not silent. `None`: the system does not tell.
#[must_use]
pub fn hear(socket: impl std::os::fd::AsFd) -> Option<Hearing> {
    #[cfg(target_os = "linux")]
    {
        let ago = |milliseconds: u32| std::time::Duration::from_millis(milliseconds.into());
        info_of(socket).map(|info| Hearing {
            unanswered: info.unacked > 0 || info.probes > 0,
            last: ago(info.last_ack_recv),
            said: ago(info.last_data_recv),
            segments: info.segs_in,
            waits: info.unacked == 0 && info.notsent_bytes > 0,
        })
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = socket;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// Says that it is dropped.
    struct Told(Arc<Mutex<Vec<&'static str>>>);

    impl Drop for Told {
        fn drop(&mut self) {
            self.0.lock().expect("nobody panics").push("the task");
        }
    }

    #[test]
    fn what_is_done_instead_of_a_task_comes_before_the_task_is_dropped() {
        // Whether it has had a turn or not.
        for turns in [0, 1] {
            let order = Arc::new(Mutex::new(Vec::new()));
            let (told, done) = (Told(order.clone()), order.clone());
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let pending = async move {
                let _told = told;
                std::future::pending::<()>().await;
            };
            let done = move || done.lock().expect("nobody panics").push("instead");
            let task = runtime.spawn(run_unless_dropped(pending, done));
            (0..turns).for_each(|_| runtime.block_on(tokio::task::yield_now()));
            assert!(!task.is_finished() && order.lock().expect("nobody panics").is_empty());
            drop(runtime);
            assert_eq!(*order.lock().expect("nobody panics"), ["instead", "the task"]);
        }
    }

    #[test]
    fn nothing_is_done_instead_of_a_task_that_ends() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let task = run_unless_dropped(tokio::task::yield_now(), || panic!("it has ended"));
        runtime.block_on(task);
    }
}
