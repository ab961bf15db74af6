//! What ends a rank with its job though another process, as that of a script, stands between it and the launcher.
//!
//! The kernel ends the launcher's own children with it, but not theirs. So the launcher holds the write end of a pipe, and a rank
//! has the kernel kill it when something is written to that pipe, or when nobody holds the write end any more. Nothing has to
//! run in the rank for that.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::FdFlags;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::env::LifelineFd;
use crate::error::AdoptError;

/// The launcher's end.
#[derive(Debug)]
pub(crate) struct Lifeline(OwnedFd);

impl Lifeline {
    /// None where it cannot be made: then ranks behind other processes are not ended with the launcher.
    pub(crate) fn new() -> Option<Lifeline> {
        let made = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map(|(_, write)| Lifeline(write));
        let made = made.and_then(|lifeline| lifeline.open().map(|_| lifeline));
        made.inspect_err(|error| tracing::debug!(%error, "ranks that scripts start may outlive this process"))
            .ok()
    }

    /// An end for one rank: whom the kernel tells is kept with each opening of a pipe.
    pub(crate) fn end(&self) -> io::Result<OwnedFd> {
        let end = self.open()?;
        Ok(if end.as_raw_fd() > 2 { end } else { rustix::io::fcntl_dupfd_cloexec(&end, 3)? })
    }

    fn open(&self) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        rustix::fs::open(format!("/proc/self/fd/{}", self.0.as_raw_fd()), flags, Mode::empty())
    }

    /// Kills all ranks that hold on to it.
    pub(crate) fn cut(&self) {
        // With a reader of our own there is one: where there is none, a write may end this process.
        let cut = self.open().and_then(|_reader| rustix::io::write(&self.0, &[0]));
        if let Err(error) = cut {
            tracing::debug!(%error, "the lifeline could not be cut");
        }
    }

    /// Whether a process holds on to it: a rank, or what one has started and not closed it in.
    pub(crate) fn is_held(&self) -> bool {
        !happened(self.as_fd(), PollFlags::ERR)
    }
}

impl AsFd for Lifeline {
    /// Has an error to tell when nobody holds on to it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether one of these events is there.
fn happened(fd: BorrowedFd<'_>, events: PollFlags) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, events)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().intersects(events)
}

/// What this process holds on to.
static HELD: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// Holds on to a lifeline for the life of this process; to one, as often as it is asked to.
pub(crate) fn hold(lifeline: LifelineFd) -> Result<(), AdoptError> {
    let number = lifeline.number();
    // The lock guards nothing that a panic could leave half changed.
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    match &*held {
        Some(held) if held.as_raw_fd() == number => return Ok(()),
        Some(_) => return Err(AdoptError::AlreadyAdopted),
        None => {}
    }
    if !lifeline.of_process {
        return Err(AdoptError::NotInherited);
    }
    // SAFETY: the borrow ends with `check` and is used for fcntl and fstat only, which touch no memory of ours but their results,
    // and answer EBADF for a number that is not open.
    check(unsafe { BorrowedFd::borrow_raw(number) }, number)?;
    // SAFETY: the number was found to be open and inherited. The launcher passed it on for this process to own and told nobody
    // else here; what is held, under the lock, keeps every later call from coming here.
    let end = unsafe { OwnedFd::from_raw_fd(number) };
    let armed = arm(&end);
    let end = held.insert(end);
    if let Err(error) = armed {
        tracing::warn!(%error, "this rank may outlive its launcher, if a script has started it");
    }
    // Before the kernel knew whom to tell.
    let cut = happened(end.as_fd(), PollFlags::IN | PollFlags::HUP);
    if cut { Err(AdoptError::LauncherGone) } else { Ok(()) }
}

/// Checks that the number is an end of a pipe that this process has inherited, and makes that no program that it starts does.
fn check(fd: BorrowedFd<'_>, number: RawFd) -> Result<(), AdoptError> {
    let refused = |problem| AdoptError::Lifeline { fd: number, problem };
    let flags = rustix::io::fcntl_getfd(fd).map_err(|_| refused("is not open"))?;
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(refused("was opened by this process itself"));
    }
    let access = rustix::fs::fcntl_getfl(fd).map_err(|_| refused("is not open"))? & OFlags::ACCMODE;
    let kind = rustix::fs::fstat(fd).map(|stat| FileType::from_raw_mode(stat.st_mode));
    if kind != Ok(FileType::Fifo) || access != OFlags::RDONLY {
        return Err(refused("is no read end of a pipe"));
    }
    rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC).map_err(|_| refused("is not open"))
}

/// Has the kernel kill this process when the lifeline is cut.
fn arm(end: &OwnedFd) -> io::Result<()> {
    let set = |command, value: libc::c_int| {
        // SAFETY: both commands take a number, and touch no memory of ours.
        if unsafe { libc::fcntl(end.as_raw_fd(), command, value) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    set(libc::F_SETOWN, rustix::process::getpid().as_raw_pid())?;
    set(F_SETSIG, libc::SIGKILL)?;
    let flags = rustix::fs::fcntl_getfl(end)?;
    Ok(rustix::fs::fcntl_setfl(end, flags | OFlags::from_bits_retain(libc::O_ASYNC as u32))?)
}

/// Which signal is sent for a descriptor, as in `fcntl(2)`; the crate `libc` has it for some targets only.
const F_SETSIG: libc::c_int = 10;
