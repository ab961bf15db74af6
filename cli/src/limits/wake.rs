//! `eventfd_asyncfd_wake`: microseconds from before the write of an eventfd in one process until a Tokio task
//! runs that slept on it in another.
//!
//! This is the floor under every message to a process that sleeps: a system call, an interrupt to an idle core,
//! the end of `epoll_wait`, and Tokio's way from there to the task. The runtime is a current_thread one without
//! a timer, whose only task waits for [`AsyncFd::readable`]. The sleeper is the parent; the child, on the
//! other core, waits without sleeping until 200 microseconds have passed, and the kernel has said meanwhile that the
//! sleeper's thread sleeps, stores the time and writes. Both read `CLOCK_MONOTONIC`. The figure is the median.

use super::process::{Mapping, Peer, now_ns};
use super::{LimitArgs, LimitError, Measurement, median};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::sync::atomic::Ordering;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How long the sleeper sleeps before it is woken.
const IDLE_NS: u64 = 200_000;
/// At least so many wakes are measured, whatever the time.
const LEAST: u64 = 300;

const ARMED: usize = 0;
const WRITTEN_AT: usize = 2;
const STOP: u64 = u64::MAX;

pub(super) fn run(args: &LimitArgs) -> Result<Measurement, LimitError> {
    let control = Mapping::shared(4096)?;
    let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
        .map_err(|e| LimitError::System("eventfd", e))?;
    // Opened here, so that it is this thread's state that the child reads.
    let state = open("/proc/thread-self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| LimitError::System("open /proc/thread-self/stat", e))?;
    let peer = Peer::start(args.cores, args.seconds, |watch| {
        for i in 1.. {
            let mut armed = 0;
            watch.spin(|| {
                std::hint::spin_loop();
                armed = control.line(ARMED).load(Ordering::Acquire);
                armed >= i
            })?;
            if armed == STOP {
                break;
            }
            let since = now_ns();
            watch.spin(|| {
                std::hint::spin_loop();
                now_ns() - since >= IDLE_NS / 4 && sleeps(&state)
            })?;
            // Nothing but the clock at the end: reading the state takes microseconds itself.
            watch.spin(|| {
                std::hint::spin_loop();
                now_ns() - since >= IDLE_NS
            })?;
            control.line(WRITTEN_AT).store(now_ns(), Ordering::Release);
            rustix::io::write(&event, &1u64.to_ne_bytes()).map_err(|e| LimitError::System("write", e))?;
        }
        Ok(())
    })?;

    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(|_| LimitError::Argument("Tokio has no runtime for eventfd_asyncfd_wake"))?;
    let mut latencies = Vec::with_capacity((args.seconds * 5000.0) as usize + 1000);
    runtime.block_on(async {
        let alarm = alarm()?;
        let (event_fd, alarm_fd) = (readable(&event)?, readable(&alarm)?);
        // Looks after the child twice a second, without any cost in between: a timer of Tokio's
        // would be programmed at every sleep.
        let guard = async {
            loop {
                let Ok(mut ready) = alarm_fd.readable().await else { return LimitError::TimedOut };
                let _ = rustix::io::read(&alarm, &mut [0u8; 8]);
                ready.clear_ready();
                if let Err(error) = peer.watch().check() {
                    return error;
                }
            }
        };
        let wakes = async {
            let end = now_ns() + (args.seconds * 1e9) as u64;
            for i in 1.. {
                control.line(ARMED).store(i, Ordering::Release);
                let mut ready = event_fd.readable().await.map_err(|_| LimitError::TimedOut)?;
                let woken = now_ns();
                let mut value = [0u8; 8];
                rustix::io::read(&event, &mut value).map_err(|e| LimitError::System("read", e))?;
                ready.clear_ready();
                if u64::from_ne_bytes(value) != 1 {
                    return Err(LimitError::WrongData);
                }
                latencies.push(
                    woken.saturating_sub(control.line(WRITTEN_AT).load(Ordering::Acquire)) as f64 * 1e-3,
                );
                if i >= LEAST && woken >= end {
                    break;
                }
            }
            Ok(())
        };
        tokio::select! {
            biased;
            result = wakes => result,
            error = guard => Err(error),
        }
    })?;
    control.line(ARMED).store(STOP, Ordering::Release);
    peer.finish()?;
    let wakes = latencies.len();
    let best = latencies.iter().copied().fold(f64::INFINITY, f64::min);
    Ok(Measurement {
        value: median(&mut latencies),
        unit: "us",
        detail: format!("median of {wakes} wakes after {} us of sleep; best {best:.1}", IDLE_NS / 1000),
    })
}

/// Whether the thread whose `stat` this is sleeps.
fn sleeps(stat: &OwnedFd) -> bool {
    let mut text = [0u8; 256];
    let Ok(len) = rustix::io::pread(stat, &mut text, 0) else { return false };
    // The state follows the name, which ends with the last parenthesis: `1 (name) S`.
    let text = &text[..len];
    let end = text.iter().rposition(|byte| *byte == b')');
    end.and_then(|end| text.get(end + 2)) == Some(&b'S')
}

/// The descriptor, registered for reading with the current runtime.
fn readable(fd: &OwnedFd) -> Result<AsyncFd<BorrowedFd<'_>>, LimitError> {
    // SAFETY: the borrow keeps the descriptor open for as long as it is registered.
    unsafe { AsyncFd::register_with_interest(fd.as_fd(), Interest::READABLE) }
        .map_err(|_| LimitError::Argument("Tokio does not take an eventfd or a timerfd"))
}

/// A descriptor that gets readable twice a second.
fn alarm() -> Result<OwnedFd, LimitError> {
    let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)
        .map_err(|e| LimitError::System("timerfd_create", e))?;
    let half = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };
    timerfd_settime(&fd, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: half, it_value: half })
        .map_err(|e| LimitError::System("timerfd_settime", e))?;
    Ok(fd)
}
