//! The redistribution between pencils along one axis and pencils along another one.

use crate::common::Result;
use crate::pencil::{Pencil, grid, points};
use futures::future::try_join_all;
use posthaste::{ActiveMessage, Job, MessageStream, Pattern, Rank, Region, Window};
use rustfft::num_complex::Complex;
use std::collections::BTreeMap;
use zerocopy::{FromBytes, IntoBytes};

pub type Number = Complex<f64>;

/// How blocks get to their ranks.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    Replay,
    Sends,
}

/// One redistribution among the ranks of a row or a column of the grid.
pub struct Transpose {
    /// The ranks, and how many points go to each.
    peers: Vec<(Rank, usize)>,
    /// Where the points that go out lie, block by block, and where those that come in belong.
    outgoing: Vec<usize>,
    incoming: Vec<usize>,
    /// The blocks that go out, which the pattern reads.
    source: Region,
    blocks: Window<[f64; 2]>,
    /// How many blocks have been put here so far.
    arrived: Window<u64>,
    pattern: Pattern,
    times: u64,
    /// The same by plain sends.
    block: ActiveMessage,
    stream: MessageStream,
}

impl Transpose {
    /// From pencils along one axis to pencils along another one. Collective.
    pub async fn new(
        job: &Job,
        name: &str,
        size: usize,
        from: [usize; 3],
        to: [usize; 3],
    ) -> Result<Transpose> {
        let (n, me) = (job.size(), job.rank().index());
        let before: Vec<Pencil> = (0..n).map(|rank| Pencil::new(size, n, rank, from)).collect();
        let after: Vec<Pencil> = (0..n).map(|rank| Pencil::new(size, n, rank, to)).collect();
        let count = |source: usize, target: usize| points(&before[source].common(&after[target]));
        let [_, columns] = grid(n);
        let together = |rank: &usize| match from[0] == to[0] {
            true => rank / columns == me / columns,
            false => rank % columns == me % columns,
        };
        let group: Vec<usize> = (0..n).filter(together).collect();
        let outgoing =
            group.iter().flat_map(|to| before[me].places(&before[me].common(&after[*to]))).collect();
        let incoming =
            group.iter().flat_map(|from| after[me].places(&after[me].common(&before[*from]))).collect();
        let peers: Vec<_> = group.iter().map(|rank| (Rank(*rank as u32), count(me, *rank))).collect();

        let source = job.region((16 * before[me].len()).max(1)).await?;
        let (blocks, arrived) = (job.shmalloc(after[me].len()).await?, job.shmalloc(1).await?);
        let pattern = job.record(|r| {
            let mut first = 0;
            for (rank, points) in &peers {
                // Blocks lie there in the order of their sources.
                let place =
                    group.iter().filter(|other| **other < me).map(|other| count(*other, rank.index())).sum();
                let block = source.slice(first..first + 16 * points);
                r.put_signal(&blocks, *rank, place, block, arrived.signal_add(0, 1))?;
                first += 16 * points;
            }
            Ok(())
        });
        let pattern = pattern.await?;
        let (block, stream) = job.stream(name)?;
        Ok(Transpose { peers, outgoing, incoming, source, blocks, arrived, pattern, times: 0, block, stream })
    }

    /// Gives the points to their new owners, and has its own in the order of the new pencil.
    pub async fn run(&mut self, data: &[Number], way: Way) -> Result<Vec<Number>> {
        let packed: Vec<[f64; 2]> = self.outgoing.iter().map(|at| [data[*at].re, data[*at].im]).collect();
        let arrived = match way {
            Way::Replay => self.replay(&packed).await?,
            Way::Sends => self.send(&packed).await?,
        };
        let mut result = vec![Number::default(); self.incoming.len()];
        for (place, [re, im]) in self.incoming.iter().zip(arrived) {
            result[*place] = Number { re, im };
        }
        Ok(result)
    }

    /// No rank gets ahead by a whole turn: for that it needs what the others send after they have read this block.
    async fn replay(&mut self, packed: &[[f64; 2]]) -> Result<Vec<[f64; 2]>> {
        self.times += 1;
        self.source.write(0, packed.as_bytes())?;
        self.pattern.replay().await?;
        let all = self.times * self.peers.len() as u64;
        self.arrived.wait_until(0, |blocks| blocks >= all).await?;
        Ok(self.blocks.to_vec())
    }

    async fn send(&mut self, packed: &[[f64; 2]]) -> Result<Vec<[f64; 2]>> {
        let mut rest = packed;
        let sends = self.peers.iter().map(|(rank, points)| {
            let block = rest.split_off(..*points).unwrap_or_default();
            self.block.send_slice(*rank, block.as_bytes())
        });
        let receive = async {
            let mut blocks = BTreeMap::new();
            while blocks.len() < self.peers.len() {
                let Some(block) = self.stream.recv().await else { break };
                blocks.insert(block.source(), block.into_bytes());
            }
            Ok(blocks.into_values().collect::<Vec<_>>().concat())
        };
        let (_, blocks) = tokio::try_join!(try_join_all(sends), receive)?;
        Ok(blocks.chunks_exact(16).filter_map(|number| <[f64; 2]>::read_from_bytes(number).ok()).collect())
    }
}
