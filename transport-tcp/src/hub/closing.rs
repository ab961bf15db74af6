//! The end of a device in order: nothing that was taken is given up while its peer can still get it.
//!
//! ```text
//!   ports are asked ── they move ──▶ something of theirs waits ── all is written ──▶ the kernel has it ── acknowledged ──▶
//!        │                           no limit                                        no limit                  │
//!        └ nobody moves them: given up after a while                         peers have `linger` to end their side ┘
//! ```
//! There is no limit where a peer has no room, because it is stopped, say, or reads nothing: its host answers, and the vigil ends the
//! connections of hosts that do not.

use super::Hub;
use posthaste_core::ContextId;
use posthaste_core::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// A port that nobody has moved for so long, though its driver was woken, is not waited for, if peers have no longer.
const UNMOVED: Duration = Duration::from_secs(1);
/// How often the kernel is asked whether all is acknowledged: it does not tell by itself.
const ASK: Duration = Duration::from_millis(20);

/// How far a port has come with its end: of its connections, the one that has come least far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Progress {
    /// It was asked, and not moved since.
    #[default]
    Asked,
    /// Nobody moves it.
    Unmoved,
    /// Something of this side waits to be written.
    Owes,
    /// All is written, the last frame and the end of the stream too; peers are still to end theirs.
    Out,
    /// No connection is left.
    Closed,
}

/// What a close waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    /// That peers make room.
    Room,
    /// That ports are moved.
    Ports,
    /// That the kernel gets rid of what was written.
    Kernel,
    /// That peers end their side.
    Peers,
}

impl Hub {
    /// A port has told how far it has come.
    pub fn port_is(&self, context: ContextId, progress: Progress) {
        let before = std::mem::replace(&mut *lock(&self.door(context).progress), progress);
        if before != progress {
            self.moved.notify_waiters();
        }
    }

    /// Asks the ports to end their connections in order and waits until they have: as long as that takes where something of
    /// this side waits, then as long as peers may linger.
    pub async fn close(self: &Arc<Self>) {
        self.closing.store(true, Ordering::Release);
        let Some(runtime) = self.runtime.get() else { return };
        self.doors.iter().for_each(|door| door.knock());
        let mut timer: Option<(Awaited, JoinHandle<()>)> = None;
        loop {
            let moved = self.moved.notified();
            let mut moved = std::pin::pin!(moved);
            moved.as_mut().enable();
            let Some(awaited) = self.awaited() else { break };
            if let Some((_, stale)) = timer.take_if(|(waited, _)| *waited != awaited) {
                stale.abort();
            }
            let (_, over) = timer.get_or_insert_with(|| (awaited, self.time_for(awaited, runtime)));
            tokio::select! {
                () = moved => continue,
                ended = over => if ended.is_err() {
                    // The runtime has ended in which the ports are driven: nobody waits for anything there.
                    break;
                }
            }
            timer = None;
            match awaited {
                Awaited::Room => self.ask_again(),
                Awaited::Ports => self.give_up_unmoved(),
                Awaited::Kernel => {}
                Awaited::Peers => break,
            }
        }
        if let Some((_, over)) = timer {
            over.abort();
        }
        self.end_in_order();
    }

    /// What is to be waited for now; `None` if nothing is.
    fn awaited(&self) -> Option<Awaited> {
        if self.aborted.load(Ordering::Acquire) {
            return None;
        }
        // Each is read once: what moves on between two reads would be in neither of two states, and seem to have ended.
        let progress: Vec<Progress> = self.doors.iter().map(|door| *lock(&door.progress)).collect();
        let is = |state| progress.contains(&state);
        if is(Progress::Owes) {
            Some(Awaited::Room)
        } else if is(Progress::Asked) {
            Some(Awaited::Ports)
        } else if self.is_unheard() {
            Some(Awaited::Kernel)
        } else {
            is(Progress::Out).then_some(Awaited::Peers)
        }
    }

    /// Ends when that was waited for long enough, or is to be looked at again.
    fn time_for(&self, awaited: Awaited, runtime: &Handle) -> JoinHandle<()> {
        let time = match awaited {
            Awaited::Room | Awaited::Ports => self.times.linger.max(UNMOVED),
            Awaited::Kernel => ASK,
            Awaited::Peers => self.times.linger,
        };
        // Inside, where there is a clock: whoever closes need not be.
        runtime.spawn(async move { tokio::time::sleep(time).await })
    }

    /// Ports that wait for room may sleep for as long as they like; those that nobody moves any more are found out.
    fn ask_again(&self) {
        for door in &self.doors {
            let mut progress = lock(&door.progress);
            if *progress == Progress::Owes {
                *progress = Progress::Asked;
                drop(progress);
                door.knock();
            }
        }
    }

    fn give_up_unmoved(&self) {
        for (context, door) in self.doors.iter().enumerate() {
            let mut progress = lock(&door.progress);
            if *progress == Progress::Asked {
                *progress = Progress::Unmoved;
                tracing::debug!(me = %self.me, context, "nobody moves a port of a device that closes");
            }
        }
    }

    /// Whether a connection that this side has ended has something left that its peer's host has not acknowledged. The end of this
    /// process would leave that to the kernel, which forgets it if the peer says something more.
    #[cfg(all(unix, not(feature = "portable")))]
    fn is_unheard(&self) -> bool {
        let table = lock(&self.table);
        let streams = table.streams.iter().filter_map(|kept| kept.stream.upgrade());
        // Of a peer that is gone nothing is waited for: its connection ends with its port, which may not be moved any more.
        let given_up = |stream: &std::net::TcpStream| {
            matches!(socket2::SockRef::from(stream).linger(), Ok(Some(Duration::ZERO)))
        };
        let mut streams = streams.filter(|stream| !given_up(stream));
        streams.any(|stream| posthaste_core::reactor::ends_unheard(&*stream))
    }

    /// Without a system that tells, what was written is taken to be there.
    #[cfg(not(all(unix, not(feature = "portable"))))]
    fn is_unheard(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bell::Bell;
    use crate::hub::Door;
    use crate::watch::{Alarm, Watch};
    use crate::{AddressBook, JobKey, TcpConfig};
    use posthaste_core::{JobShape, Rank};
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_port_that_moves_on_meanwhile_is_waited_for() {
        let shape = JobShape { ranks: 1, clients: 1, contexts: 1 };
        let config = TcpConfig::new(Rank(0), shape, [9; 16], JobKey::new([5; 32]));
        let watch = Watch::new().expect("a descriptor");
        let door = Door::new(Arc::new(Bell::new(Alarm::new(&watch).expect("a descriptor"))));
        let hub = Hub::new(&config, Arc::new(AddressBook::new(1)), Box::new([Arc::new(door)]));
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    for progress in [Progress::Owes, Progress::Out, Progress::Asked] {
                        hub.port_is(ContextId(0), progress);
                    }
                }
            });
            let ended = (0..300_000).position(|_| hub.awaited().is_none());
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(ended, None, "nothing was awaited");
        });
    }
}
