//! The kernel of the simulated world.

use super::SimFabric;
use posthaste_core::sysdep::{Headroom, Personality, Sysdep, ThreadMain};
use std::sync::Arc;
use std::time::Duration;

/// A [`Sysdep`] whose clock is moved by the stepper and whose random bytes follow from the seed.
#[derive(Debug)]
pub struct SimSysdep {
    fabric: Arc<SimFabric>,
    personality: Personality,
}

impl SimSysdep {
    /// The kernel as one rank sees it.
    #[must_use]
    pub fn new(fabric: Arc<SimFabric>, personality: Personality) -> Self {
        Self { fabric, personality }
    }
}

impl Sysdep for SimSysdep {
    fn now(&self) -> Duration {
        self.fabric.now()
    }

    fn personality(&self) -> &Personality {
        &self.personality
    }

    fn cores(&self) -> usize {
        1
    }

    fn spawn(&self, _name: &str, _core: Option<usize>, _main: ThreadMain) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn yield_now(&self) {
        // Whoever gives its core away until a time has come would do so for ever.
        self.fabric.pass_time(Duration::from_micros(1));
    }

    fn heavy_fence(&self) {}

    fn fence_is_asymmetric(&self) -> bool {
        true
    }

    fn headroom(&self) -> Headroom {
        Headroom { host: u64::MAX, cgroup: None }
    }

    fn random(&self, bytes: &mut [u8]) {
        self.fabric.fill_random(bytes);
    }
}
