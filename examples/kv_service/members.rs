//! Which ranks have finished, and which are dead.

use crate::common::Result;
use posthaste::{Counter, Fault, Job, Rank, Scope, SendError, TypedMessage};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a rank's clients counted, and how many keys the rank had then; sent as it lies in memory.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Counts {
    pub answered: u64,
    pub late: u64,
    pub lost: u64,
    pub verified: u64,
    pub keys: u64,
}

/// How the ranks end. Collective operations need all ranks; this does not.
pub struct Members {
    finished: TypedMessage<Counts>,
    ends: Arc<Mutex<BTreeMap<Rank, Option<Counts>>>>,
    changed: Counter,
}

impl Members {
    pub fn new(job: &Job) -> Result<Members> {
        let ends: Arc<Mutex<BTreeMap<Rank, Option<Counts>>>> = Arc::default();
        let changed = job.counter();
        let (list, count) = (ends.clone(), changed.clone());
        let end = move |rank, counts| {
            // Who has finished may leave: that is no death.
            list.lock().unwrap().entry(rank).or_insert(counts);
            count.add(1);
        };
        let died = end.clone();
        job.on_error(move |fault| {
            // Dead, or cut off: nothing comes of it any more.
            if let Fault::PeerLost(rank) | Fault::PeerCorrupt(rank) = fault {
                died(rank, None);
            }
        });
        let finished =
            job.register_typed("finished", move |counts, from, _: &mut Scope| end(from, Some(counts)))?;
        Ok(Members { finished, ends, changed })
    }

    /// Tells all that this rank's clients have finished, and waits until those of all living ranks have.
    pub async fn finish(&self, job: &Job, counts: Counts) -> Result<Vec<Option<Counts>>> {
        for rank in job.ranks() {
            match self.finished.send(rank, &counts).await {
                Ok(()) | Err(SendError::Fault(Fault::PeerLost(_) | Fault::PeerCorrupt(_))) => {}
                Err(error) => return Err(error.into()),
            }
        }
        loop {
            let seen = self.changed.value();
            let ends = self.ends.lock().unwrap().clone();
            if ends.len() == job.size() {
                return Ok(ends.into_values().collect());
            }
            self.changed.reach(seen + 1).await;
        }
    }
}
