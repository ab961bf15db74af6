//! The seeded simulated world: ranks, a network and a clock in one thread.
//!
//! ```text
//!   Port::inject --> in flight (due at a virtual time) --move--> arrived --Port::advance--> Sink::packet
//!                \-> put or get, in flight --move--> done at the target --move--> Sink::complete at the source
//! ```
//! Within an ordered pair of endpoints sends stay in order, puts and gets stay in order, and no send arrives before
//! the puts that were injected before it. A put may overtake an earlier send. Across pairs everything is free.
//!
//! [`SimWorld::step`] does one thing: it lets one rank advance, or moves one item, or lets time pass. Which, follows
//! from the seed alone.

mod device;
mod net;
mod sysdep;
mod world;

pub use device::SimDevice;
pub use net::{Ration, SimFabric, Tamper, Tampered};
pub use sysdep::SimSysdep;
pub use world::{SimWorld, open_without_driver};

/// What the simulated network is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Sends that may be on their way per ordered pair of endpoints, and puts and gets likewise; at least 1.
    pub lane_slots: usize,
    /// Longest payload in bytes that is delivered as a short body; at least 80, for the messager's own records.
    pub max_inline: usize,
    /// Longest payload in bytes of one packet.
    pub max_eager: usize,
    /// Fragment length in bytes of streamed messages.
    pub fragment: usize,
    /// Longest time in virtual microseconds that an item spends in flight.
    pub delay: u64,
    /// Chance in percent that a rank which is about to advance stalls for a while instead.
    pub stall: u32,
    /// Chance in percent that an injection finds no room although there is some.
    pub refuse: u32,
    /// Items of different pairs overtake each other; never those of one pair.
    pub reorder: bool,
    /// Puts and gets are offered.
    pub native: bool,
    /// Memory of each rank in bytes.
    pub segment: u64,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            lane_slots: 8,
            max_inline: 128,
            max_eager: 1024,
            fragment: 512,
            delay: 50,
            stall: 2,
            refuse: 5,
            reorder: true,
            native: true,
            segment: 256 << 10,
        }
    }
}

impl SimOptions {
    /// One-slot lanes, the shortest packets there may be, and much refusing.
    #[must_use]
    pub fn tiny() -> Self {
        Self {
            lane_slots: 1,
            max_inline: 80,
            max_eager: 96,
            fragment: 33,
            refuse: 20,
            stall: 5,
            ..Self::default()
        }
    }

    /// Brings what is out of range into range.
    #[must_use]
    pub(crate) fn checked(self) -> Self {
        let max_inline = self.max_inline.max(posthaste_core::inprocess::MIN_INLINE);
        let max_eager = self.max_eager.max(max_inline);
        Self {
            lane_slots: self.lane_slots.max(1),
            max_inline,
            max_eager,
            fragment: self.fragment.clamp(1, max_eager),
            stall: self.stall.min(90),
            refuse: self.refuse.min(90),
            ..self
        }
    }
}
