//! The device over shared memory: ranks of one node (a host, or a part of one) talk through one sealed, sparse memfd.
//!
//! Lanes carry small messages, pages of the sender larger ones; windows and regions are written and read in
//! place. A sleeping rank is woken through a pipe, whose breaking also tells the others that it is gone.

#![deny(unsafe_code)]

mod arena;
pub mod batch;
mod bell;
mod device;
pub mod grants;
pub mod inbox;
pub mod lane;
pub mod layout;
mod link;
pub mod pages;
mod port;
pub mod ready;
mod ring;
pub mod room;

pub use arena::{Arena, Presence};
pub use device::{Host, HostResources, ShmDevice};
pub use layout::{Layout, LayoutError, Sizes};
