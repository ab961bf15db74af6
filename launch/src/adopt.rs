//! Turns numbers from the environment into owned descriptors: the one place where that is done.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, OFlags, Stat};
use rustix::io::{Errno, FdFlags};

use crate::env::FdNumbers;
use crate::error::AdoptError;
use crate::foreign::ForeignError;
use crate::inherited::InheritedFds;

/// Whether this process has adopted its descriptors.
static ADOPTED: AtomicBool = AtomicBool::new(false);

/// What the launcher put under a number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Arena,
    Bell,
    Ring,
}

impl Role {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Arena => "the arena",
            Self::Bell => "the read end of a doorbell",
            Self::Ring => "the write end of a doorbell",
        }
    }
}

/// Adopts the numbers if all of them are what the launcher made; if not, leaves all of them alone.
///
/// This rank's doorbell is at `place` in the ring.
pub(crate) fn adopt(numbers: &FdNumbers, place: u32) -> Result<InheritedFds, AdoptError> {
    // Relaxed is enough: the flag guards no other memory, only the right to go on, and a swap has one winner.
    if ADOPTED.swap(true, Ordering::Relaxed) {
        return Err(AdoptError::AlreadyAdopted);
    }
    let checked = check_all(numbers, place);
    if checked.is_err() {
        ADOPTED.store(false, Ordering::Relaxed);
    }
    checked?;
    let own = |fd: RawFd| {
        // SAFETY: `check_all` has just found `fd` open and to be of the job. The launcher passed the numbers on for
        // this process to own, nothing else here knows them, they are pairwise distinct (`FdNumbers::parse`), and
        // `ADOPTED` lets only one call ever come here; so each gets exactly one owner.
        unsafe { OwnedFd::from_raw_fd(fd) }
    };
    Ok(InheritedFds {
        arena: own(numbers.arena),
        bell: own(numbers.bell),
        ring: numbers.ring.iter().copied().map(own).collect(),
    })
}

fn check_all(numbers: &FdNumbers, place: u32) -> Result<(), AdoptError> {
    let ring = numbers.ring.iter().map(|fd| (*fd, Role::Ring));
    let all = || [(numbers.arena, Role::Arena), (numbers.bell, Role::Bell)].into_iter().chain(ring.clone());
    for (fd, role) in all() {
        // SAFETY: the borrow ends with this iteration and is used for fstat and fcntl only, which touch no memory of
        // ours and answer EBADF for a number that is not open.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        check(borrowed, fd, role)?;
    }
    // A rank's own doorbell, seen from both ends, is one pipe; so numbers reused by chance are found out.
    let own = *numbers.ring.get(place as usize).ok_or(AdoptError::NotInherited)?;
    // SAFETY: both numbers were found open above; the borrows last for two calls of fstat.
    let (bell, own) = unsafe { (BorrowedFd::borrow_raw(numbers.bell), BorrowedFd::borrow_raw(own)) };
    same_pipe(bell, own, numbers.bell)?;
    for (fd, role) in all() {
        // SAFETY: found open above; the borrow lasts for one call of fcntl.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        // From here on, no program that this process starts keeps them open.
        rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|errno| system(errno, fd, role))?;
    }
    Ok(())
}

/// Checks that a descriptor is what its role says.
pub(crate) fn check(fd: BorrowedFd<'_>, number: RawFd, role: Role) -> Result<(), AdoptError> {
    let stat = stat(fd, number, role)?;
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|errno| system(errno, number, role))?;
    let access = flags & OFlags::ACCMODE;
    let kind = FileType::from_raw_mode(stat.st_mode);
    let right = match role {
        Role::Arena => kind == FileType::RegularFile && stat.st_size > 0 && access == OFlags::RDWR,
        Role::Bell => kind == FileType::Fifo && access == OFlags::RDONLY,
        Role::Ring => kind == FileType::Fifo && access == OFlags::WRONLY,
    };
    if right { Ok(()) } else { Err(AdoptError::WrongKind { fd: number, role: role.name() }) }
}

/// Checks that both ends belong to one pipe.
pub(crate) fn same_pipe(
    read: BorrowedFd<'_>,
    write: BorrowedFd<'_>,
    number: RawFd,
) -> Result<(), AdoptError> {
    let (a, b) = (stat(read, number, Role::Bell)?, stat(write, number, Role::Bell)?);
    if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) {
        return Ok(());
    }
    Err(AdoptError::WrongKind { fd: number, role: "the doorbell of this rank" })
}

fn stat(fd: BorrowedFd<'_>, number: RawFd, role: Role) -> Result<Stat, AdoptError> {
    rustix::fs::fstat(fd).map_err(|errno| system(errno, number, role))
}

fn system(errno: Errno, fd: RawFd, role: Role) -> AdoptError {
    match errno {
        Errno::BADF => AdoptError::Gone { fd, role: role.name() },
        _ => AdoptError::System { fd, role: role.name(), source: errno.into() },
    }
}

/// Held from looking at a number to marking it as taken.
static SOCKET: Mutex<()> = Mutex::new(());

/// Takes over the socket that another launcher's process manager passed on under a number.
///
/// A descriptor that survived `exec` is not close-on-exec, and those that this process opens are: so a number that was
/// given away anew, and one taken over before, are told apart from what was inherited.
pub(crate) fn adopt_socket(fd: RawFd) -> Result<OwnedFd, ForeignError> {
    // The lock guards no data that a panic could leave half changed.
    let _guard = SOCKET.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // SAFETY: the borrow ends with this function and is used for fcntl, fstat and getpeername only, which touch no
    // memory of ours but their results, and answer EBADF for a number that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let refused = |problem| ForeignError::NotInherited { fd, problem };
    let flags = rustix::io::fcntl_getfd(borrowed).map_err(|_| refused("is not open"))?;
    if flags.contains(FdFlags::CLOEXEC) {
        return Err(refused("this process has opened or taken over itself"));
    }
    let stream = rustix::net::sockopt::socket_type(borrowed) == Ok(rustix::net::SocketType::STREAM);
    if !stream || rustix::net::getpeername(borrowed).is_err() {
        return Err(refused("is no connected socket"));
    }
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|_| refused("is not open"))?;
    // SAFETY: the number was found to be open and inherited. Whoever started this process passed it on for it to own
    // and told nobody else; the mark just set, under the lock, keeps every later call from coming here with it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
