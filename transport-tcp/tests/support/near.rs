//! A device that reaches some ranks only.

use async_trait::async_trait;
use posthaste_core::device::{Allocation, Doorbell, PeerNews};
use posthaste_core::memory::SharedSlice;
use posthaste_core::{Caps, ContextId, Device, DeviceError, MemoryError, Port, Rank};
use std::sync::Arc;

/// Reaches ranks of the same parity.
struct Near {
    device: Arc<dyn Device>,
    me: Rank,
}

pub fn near(device: Arc<dyn Device>, me: Rank) -> Arc<dyn Device> {
    Arc::new(Near { device, me })
}

#[async_trait]
impl Device for Near {
    fn caps(&self) -> &Caps {
        self.device.caps()
    }

    fn reaches(&self, rank: Rank) -> bool {
        rank.0 % 2 == self.me.0 % 2 && self.device.reaches(rank)
    }

    fn port(&self, context: ContextId) -> Result<Box<dyn Port>, DeviceError> {
        self.device.port(context)
    }

    fn doorbell(&self, context: ContextId) -> Arc<dyn Doorbell> {
        self.device.doorbell(context)
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        self.device.allocate(len)
    }

    fn free(&self, allocation: Allocation) {
        self.device.free(allocation);
    }

    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        if self.reaches(rank) { self.device.map(rank, offset, len) } else { None }
    }

    async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
        self.device.open(news).await
    }

    async fn close(&self) {
        self.device.close().await;
    }
}
