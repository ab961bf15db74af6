//! A persistent allreduce: the ranks are a tree, up which sums go and down which the result comes, each by a recorded
//! pattern. At each level a rank waits for a counter and replays the next pattern.

use crate::common::Result;
use posthaste::{Job, Pattern, Rank, Region, Window};
use zerocopy::IntoBytes;

/// Adds up `len` numbers over all ranks, again and again. The order of the additions is always the same, and all ranks
/// get what rank 0 has, to the last bit.
pub struct AllReduce {
    len: usize,
    children: u64,
    /// What came from the first child, from the second one, and from above.
    slots: Window<f64>,
    /// How much came from below, and from above.
    arrived: Window<u64>,
    /// What goes up or down.
    source: Region,
    /// To the parent; rank 0 has none.
    up: Option<Pattern>,
    /// To the children.
    down: Option<Pattern>,
    times: u64,
}

/// Places in `arrived`.
const BELOW: usize = 0;
const ABOVE: usize = 1;

impl AllReduce {
    /// Collective.
    pub async fn new(job: &Job, len: usize) -> Result<AllReduce> {
        let (me, n) = (job.rank().0, job.size() as u32);
        let slots = job.shmalloc(3 * len).await?;
        let arrived = job.shmalloc(2).await?;
        let source = job.region(8 * len).await?;
        let children: Vec<Rank> = (2 * me + 1..2 * me + 3).filter(|child| *child < n).map(Rank).collect();
        let (mut up, mut down) = (None, None);
        if me > 0 {
            let (parent, place) = (Rank((me - 1) / 2), (me as usize - 1) % 2 * len);
            let pattern =
                job.record(|r| r.put_signal(&slots, parent, place, &source, arrived.signal_add(BELOW, 1)));
            up = Some(pattern.await?);
        }
        if !children.is_empty() {
            let pattern = job.record(|r| {
                let mut children = children.iter();
                children.try_for_each(|child| {
                    r.put_signal(&slots, *child, 2 * len, &source, arrived.signal_add(ABOVE, 1))
                })
            });
            down = Some(pattern.await?);
        }
        Ok(AllReduce { len, children: children.len() as u64, slots, arrived, source, up, down, times: 0 })
    }

    /// Replaces the values by their sums over all ranks. Nobody overwrites what was not read: a child sends the next
    /// values when it has the result of the last ones, and a rank the next result when it has the next values.
    pub async fn sum(&mut self, values: &mut [f64]) -> Result<()> {
        self.times += 1;
        let mut other = vec![0.0; self.len];
        let all = self.times * self.children;
        self.arrived.wait_until(BELOW, |arrived| arrived >= all).await?;
        for child in 0..self.children as usize {
            self.slots.load_slice(child * self.len, &mut other)?;
            values.iter_mut().zip(&other).for_each(|(sum, value)| *sum += value);
        }
        if let Some(up) = &self.up {
            self.source.write(0, values.as_bytes())?;
            up.replay().await?;
            self.arrived.wait_until(ABOVE, |arrived| arrived >= self.times).await?;
            self.slots.load_slice(2 * self.len, values)?;
        }
        if let Some(down) = &self.down {
            self.source.write(0, values.as_bytes())?;
            down.replay().await?;
        }
        Ok(())
    }
}
