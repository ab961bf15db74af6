//! The arena's file: sparse, of fixed size, without a name.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate};
use rustix::io::Errno;

use crate::error::HostFdsError;
use crate::key::fill_random;

/// What the arena is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ArenaKind {
    /// Anonymous memory, sealed against growing and shrinking.
    Memfd,
    /// A file without a name in this directory, where memfd is refused; it cannot be sealed.
    UnlinkedFile(PathBuf),
}

impl fmt::Display for ArenaKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memfd => f.write_str("sealed memfd"),
            Self::UnlinkedFile(dir) => write!(f, "unlinked file in {}", dir.display()),
        }
    }
}

/// Makes the arena's file; nothing of it is committed yet.
pub(crate) fn create(bytes: u64) -> Result<(OwnedFd, ArenaKind), HostFdsError> {
    if bytes == 0 || i64::try_from(bytes).is_err() {
        return Err(HostFdsError::ArenaBytes(bytes));
    }
    let memfd = match memfd(bytes) {
        Ok(fd) => return Ok((fd, ArenaKind::Memfd)),
        Err(error) => error,
    };
    tracing::warn!(%memfd, "memfd is refused; the arena is an unlinked file");
    let temporary = std::env::temp_dir();
    match unlinked(Path::new("/dev/shm"), bytes) {
        Ok(fd) => Ok((fd, ArenaKind::UnlinkedFile("/dev/shm".into()))),
        Err(_) => match unlinked(&temporary, bytes) {
            Ok(fd) => Ok((fd, ArenaKind::UnlinkedFile(temporary))),
            Err(source) => {
                Err(HostFdsError::Arena { bytes, memfd: memfd.to_string(), dir: temporary, source })
            }
        },
    }
}

fn memfd(bytes: u64) -> io::Result<OwnedFd> {
    if std::env::var_os("POSTHASTE_TEST_NO_MEMFD").is_some_and(|value| value == "1") {
        return Err(io::Error::other("POSTHASTE_TEST_NO_MEMFD is set"));
    }
    let fd = rustix::fs::memfd_create("posthaste", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(fd)
}

/// A file that never has a name, or loses it at once where the file system knows no nameless files.
fn unlinked(dir: &Path, bytes: u64) -> io::Result<OwnedFd> {
    let file = File::from(nameless(dir).or_else(|_| unlinked_at_once(dir))?);
    file.set_len(bytes)?;
    // Where memory cannot be had before it is touched, the lack of it would end the process that touches it.
    let unable = |errno| match errno {
        Errno::OPNOTSUPP => io::Error::other("its file system cannot reserve memory (fallocate)"),
        errno => errno.into(),
    };
    fallocate(&file, FallocateFlags::empty(), 0, 4096).map_err(unable)?;
    // Where a hole cannot be made again, the first page stays; it is the first to be used anyway.
    let _ = fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 4096);
    Ok(file.into())
}

fn nameless(dir: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE | OFlags::EXCL;
    Ok(rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR)?)
}

fn unlinked_at_once(dir: &Path) -> io::Result<OwnedFd> {
    let mut random = [0; 16];
    fill_random(&mut random)?;
    let path = dir.join(format!("posthaste-{:032x}", u128::from_ne_bytes(random)));
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::unlink(&path)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_kind_of_file_has_a_name() {
        let dir = tempfile::tempdir().unwrap();
        for make in [nameless, unlinked_at_once] {
            let fd = make(dir.path()).unwrap();
            let stat = rustix::fs::fstat(&fd).unwrap();
            assert_eq!((stat.st_nlink, stat.st_mode & 0o777), (0, 0o600));
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }
}
