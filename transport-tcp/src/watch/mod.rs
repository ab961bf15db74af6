//! Readiness of many sockets at once, and sleeping until there is some.
//!
//! On Linux a [`Watch`] is an epoll instance that a port looks at itself, without the runtime. Its [`Alarm`] is
//! another one, which the runtime watches and in which the first is entered only while the port sleeps: packets for a
//! port that is awake wake nobody else. Elsewhere every socket is taken to be ready at each look, so that a look says
//! nothing to a port that is about to sleep ([`TELLS`]), and a sleeping port looks every millisecond. The feature
//! `portable` has Linux do the same, for tests.

#[cfg(all(target_os = "linux", not(feature = "portable")))]
mod linux;
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
mod portable;

#[cfg(all(target_os = "linux", not(feature = "portable")))]
pub(crate) use linux::{Alarm, TELLS, Watch};
#[cfg(not(all(target_os = "linux", not(feature = "portable"))))]
pub(crate) use portable::{Alarm, TELLS, Watch};

/// What is known of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Readiness {
    /// The number it was entered under.
    pub key: u64,
    /// There may be something to read.
    pub readable: bool,
    /// There may be room to write.
    pub writable: bool,
    /// The other side has ended its stream, or the connection is broken.
    pub ended: bool,
}
