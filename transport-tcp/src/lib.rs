//! The device over TCP.
#![forbid(unsafe_code)]

mod bell;
mod book;
mod config;
mod device;
mod dial;
pub mod frame;
mod gate;
pub mod handshake;
mod hub;
mod memory;
mod outgoing;
mod port;
mod record;
mod rx;
mod socket;
mod throttle;
mod tx;
#[cfg(unix)]
mod vigil;
mod watch;

pub use book::{AddressBook, PeerAddress};
pub use config::{JobKey, KEY_LEN, Limits, Memory, Mode, TcpConfig, Times};
pub use device::TcpDevice;
