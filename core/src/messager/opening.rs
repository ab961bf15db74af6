//! How a client is opened: what its devices tell of the peers, and of the end of the runtime that has their tasks, goes to its contexts
//! from here.

use super::{Losses, Restarts};
use crate::context::Handle;
use crate::device::{Device, PeerEvent};
use crate::engine::{Gates, Work};
use crate::error::{DeviceError, Fault};
use crate::ids::Rank;
use crate::route::Routes;
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Held by the runtime in which a client was opened whose drivers are elsewhere.
pub(super) struct OpenedIn {
    pub(super) contexts: Vec<Handle>,
}

impl Drop for OpenedIn {
    /// The runtime ends, or the drivers have: then nothing is pending.
    fn drop(&mut self) {
        self.contexts.iter().for_each(Handle::shut_down);
    }
}

/// What the devices of a client are opened with: it keeps no client alive.
pub(super) struct Opening {
    pub(super) contexts: Vec<Handle>,
    pub(super) routes: Routes,
    pub(super) gates: crate::sync::Arc<Gates>,
    pub(super) restarts: Arc<Restarts>,
    pub(super) losses: Arc<Losses>,
}

impl Opening {
    pub(super) async fn open(&self) -> Result<(), DeviceError> {
        for (at, device) in self.routes.devices().iter().enumerate() {
            if let Err(error) = self.open_device(at, device).await {
                self.undo(at).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// One device could not be opened: those before it are closed again. Otherwise their watches, which lead back to the
    /// contexts, would keep all of it for ever.
    async fn undo(&self, opened: usize) {
        let closing = std::pin::pin!(async {
            for device in self.routes.devices()[..opened].iter().rev() {
                device.close().await;
            }
        });
        // Nobody drives the contexts yet, and ports may have something to end.
        let driving = std::pin::pin!(async {
            loop {
                self.contexts.iter().for_each(|context| {
                    context.advance();
                });
                tokio::task::yield_now().await;
            }
        });
        futures::future::select(closing, driving).await;
        for context in &self.contexts {
            context.shut_down();
            // A port that was never open is not moved: what others have sent is for the one that is opened next.
            if opened > 0 {
                context.advance();
            }
        }
    }

    async fn open_device(&self, at: usize, device: &Arc<dyn Device>) -> Result<(), DeviceError> {
        let Opening { contexts, routes, gates, restarts, losses } = self;
        let (contexts, ways) = (contexts.clone(), routes.ways());
        let (gates, restarts, losses) = (gates.clone(), restarts.clone(), losses.clone());
        let me = contexts.first().map(|context| context.me().rank);
        let news = move |rank: Rank, event: PeerEvent| match event {
            // Its runtime ends.
            PeerEvent::Down { fault: Fault::Shutdown, .. } if me == Some(rank) => {
                contexts.iter().for_each(Handle::shut_down);
            }
            // What the others know of the rank says nothing about what is still on its way through this one.
            PeerEvent::Down { .. } if !ways.lead_through(rank, at) => {}
            PeerEvent::Down { fault, incarnation, cause } => {
                // Before anybody can ask why.
                losses.note(rank, fault, incarnation, cause);
                contexts.iter().for_each(|context| context.post_work(Work::Peer(rank, event)));
            }
            PeerEvent::Up { incarnation } => {
                ways.turn(rank, at);
                let missing = Arc::new(AtomicUsize::new(contexts.len()));
                for context in &contexts {
                    context.post_work(Work::Peer(rank, event));
                    let (missing, gates, restarts) = (missing.clone(), gates.clone(), restarts.clone());
                    // Behind it: the last context to get here tells those who wait.
                    context.post_run(move |_| {
                        if missing.fetch_sub(1, Ordering::AcqRel) == 1 {
                            gates.restarted(rank, incarnation);
                            restarts.changed.notify_waiters();
                            let handler = lock(&restarts.handler).clone();
                            if let Some(handler) = handler {
                                handler(rank, incarnation);
                            }
                        }
                    });
                }
            }
        };
        device.open(Arc::new(news)).await
    }
}
