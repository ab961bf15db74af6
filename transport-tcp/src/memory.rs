//! The memory that peers put to and get from.

use crate::config::{Memory, TcpConfig};
use posthaste_core::device::Allocation;
use posthaste_core::inprocess::Arena;
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Device, MemoryError, Rank};
use std::sync::Arc;

/// This rank's memory.
pub(crate) enum Home {
    Own(Arena),
    Of(Arc<dyn Device>, Rank),
}

impl Home {
    pub fn new(config: &TcpConfig) -> Home {
        match &config.memory {
            Memory::Own(bytes) => Home::Own(Arena::new(1, *bytes)),
            Memory::Of(device) => Home::Of(device.clone(), config.rank),
        }
    }

    pub fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        match self {
            Home::Own(arena) => arena.allocate(Rank(0), len),
            Home::Of(device, _) => device.allocate(len),
        }
    }

    pub fn free(&self, allocation: Allocation) {
        match self {
            Home::Own(arena) => arena.free(Rank(0), &allocation),
            Home::Of(device, _) => device.free(allocation),
        }
    }

    /// A range of it; `None` if there is no such range.
    pub fn slice(&self, offset: u64, len: u64) -> Option<SharedSlice> {
        match self {
            Home::Own(arena) => arena.slice(Rank(0), offset, len),
            Home::Of(device, me) => device.map(*me, offset, len),
        }
    }
}
