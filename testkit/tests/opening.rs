//! A client one of whose devices cannot be opened.

use async_trait::async_trait;
use posthaste_core::device::{Allocation, Doorbell, PeerNews};
use posthaste_core::engine::EngineConfig;
use posthaste_core::inprocess::InProcessFabric;
use posthaste_core::memory::SharedSlice;
use posthaste_core::messager::ClientParts;
use posthaste_core::sysdep::Personality;
use posthaste_core::{
    Caps, Client, ClientId, ContextId, Device, DeviceError, Fault, JobShape, LinuxSysdep, MemoryError,
    Messager, Port, Rank,
};
use posthaste_testkit::conformance::Probe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SHAPE: JobShape = JobShape { ranks: 2, clients: 1, contexts: 2 };

/// What has become of a device.
type Story = Arc<Mutex<Vec<&'static str>>>;

/// A device that is opened and closed, or refuses.
struct Told {
    device: Arc<dyn Device>,
    refuses: bool,
    story: Story,
}

impl Told {
    fn tell(&self, what: &'static str) {
        self.story.lock().expect("no panic").push(what);
    }
}

#[async_trait]
impl Device for Told {
    fn caps(&self) -> &Caps {
        self.device.caps()
    }

    fn reaches(&self, rank: Rank) -> bool {
        // The first device reaches this rank only, so that there is need for the second.
        self.refuses || rank == Rank(0)
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
        self.device.map(rank, offset, len)
    }

    async fn open(&self, news: PeerNews) -> Result<(), DeviceError> {
        if self.refuses {
            self.tell("refused");
            return Err(DeviceError::Mismatch { subject: "the second device", problem: "it refuses".into() });
        }
        self.tell("opened");
        self.device.open(news).await
    }

    async fn close(&self) {
        self.tell("closed");
        self.device.close().await;
    }
}

#[tokio::test]
async fn a_device_that_cannot_be_opened_leaves_nothing_of_those_before_it() {
    let fabrics = [0, 1].map(|_| InProcessFabric::new(SHAPE));
    let story = Story::default();
    let devices = fabrics.iter().zip([false, true]).map(|(fabric, refuses)| {
        let device = fabric.device(ClientId(0), Rank(0));
        Arc::new(Told { device, refuses, story: story.clone() }) as Arc<dyn Device>
    });
    let client = Client::new(ClientParts {
        id: ClientId(0),
        devices: devices.collect(),
        sysdep: Arc::new(LinuxSysdep::new(Personality::one_node(Rank(0), SHAPE), None)),
        config: EngineConfig::default(),
        spin: Some(Duration::ZERO),
        driver_thread: false,
    })
    .expect("the ports are made");
    // A protocol lives as long as the contexts do.
    let alive = Arc::new(());
    let held = alive.clone();
    let probe = Probe::new("holds", move |_, _| {
        let _ = &held;
    });
    client.register(Arc::new(probe)).expect("the name is free");
    let opened = client.open().await;
    assert!(matches!(opened, Err(DeviceError::Mismatch { subject: "the second device", .. })), "{opened:?}");
    assert_eq!(*story.lock().expect("no panic"), ["opened", "refused", "closed"]);
    assert!(client.contexts().iter().all(|context| context.is_closed()));
    assert!(client.restarted(Rank(1), 0).await.is_err_and(|fault| fault == Fault::Shutdown));
    drop(client);
    drop(fabrics);
    assert_eq!(Arc::strong_count(&alive), 1, "what watches over the peers keeps the contexts");
}
