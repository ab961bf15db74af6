//! Over epoll.

use super::Readiness;
use posthaste_core::reactor;
use rustix::event::epoll::{self, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::task::{Context, Poll, ready};
use tokio::io::unix::AsyncFd;

/// Events taken by one system call.
const EVENTS: usize = 64;

/// A look tells what has changed.
pub(crate) const TELLS: bool = true;

/// Readiness of the sockets of one port.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
}

impl Watch {
    pub fn new() -> io::Result<Watch> {
        Ok(Watch { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Enters a socket: each change of its readiness is reported once. It leaves when it is closed.
    pub fn add(&self, socket: impl AsFd, key: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, socket, EventData::new_u64(key), flags)?;
        Ok(())
    }

    /// Enters a socket whose being readable is reported again and again.
    pub fn add_listener(&self, socket: impl AsFd, key: u64) -> io::Result<()> {
        epoll::add(&self.epoll, socket, EventData::new_u64(key), EventFlags::IN)?;
        Ok(())
    }

    /// Takes out a socket that somebody else has from now on.
    pub fn remove(&self, socket: impl AsFd, _key: u64) -> io::Result<()> {
        epoll::delete(&self.epoll, socket)?;
        Ok(())
    }

    /// Reports what has changed, up to a limit; true if there may be more.
    pub fn look(&self, mut report: impl FnMut(Readiness)) -> bool {
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut room = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS];
        let Ok((found, _)) = epoll::wait(&self.epoll, &mut room, Some(&now)) else { return false };
        for event in &*found {
            let flags = event.flags;
            let ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
            report(Readiness {
                key: event.data.u64(),
                readable: ended || flags.contains(EventFlags::IN),
                writable: flags.contains(EventFlags::OUT),
                ended,
            });
        }
        found.len() == EVENTS
    }
}

/// Tells the runtime that a sleeping port's [`Watch`] has something.
#[derive(Debug)]
pub(crate) struct Alarm {
    outer: OwnedFd,
    inner: OwnedFd,
    registered: OnceLock<AsyncFd<OwnedFd>>,
}

impl Alarm {
    pub fn new(watch: &Watch) -> io::Result<Alarm> {
        Ok(Alarm {
            outer: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            inner: watch.epoll.try_clone()?,
            registered: OnceLock::new(),
        })
    }

    /// Registers with the current runtime.
    pub fn start(&self) -> io::Result<()> {
        if self.registered.get().is_none() {
            // Nobody else starts it: a device is opened once.
            let _ = self.registered.set(reactor::register(self.outer.try_clone()?)?);
        }
        Ok(())
    }

    /// From now on the runtime is told, also of what is there already.
    pub fn set(&self) -> io::Result<()> {
        epoll::add(&self.outer, &self.inner, EventData::new_u64(0), EventFlags::IN)?;
        Ok(())
    }

    /// Not any more.
    pub fn clear(&self) {
        // It was set, so that it can be taken out.
        let _ = epoll::delete(&self.outer, &self.inner);
    }

    /// Ready when the alarm has gone off since the last time.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(registered) = self.registered.get() else { return Poll::Pending };
        let mut found = ready!(registered.poll_read_ready(cx))?;
        found.clear_ready();
        Poll::Ready(Ok(()))
    }
}
