//! A histogram whose bins are spread over all ranks.

use crate::array::GlobalArray;
use crate::common::Result;
use posthaste::Job;

/// How many bins there are.
const BINS: usize = 1000;

/// The bin of a rank's sample: the middle ones are more frequent.
fn bin(rank: usize, sample: usize) -> usize {
    let mut bits = (rank as u64) << 32 | sample as u64;
    (0..4)
        .map(|_| {
            // splitmix64
            bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33) as usize % (BINS / 4)
        })
        .sum()
}

/// Counts what all ranks draw and compares the bins with a sequential count; the number of the fullest bin.
pub async fn run(job: &Job, samples: usize) -> Result<u64> {
    let bins = GlobalArray::<u64>::new(job, BINS).await?;
    let me = job.rank().index();
    for sample in 0..samples {
        bins.fetch_add(bin(me, sample), 1).await?;
    }
    bins.barrier().await?;

    let mut alone = vec![0; BINS];
    (0..job.size()).for_each(|rank| (0..samples).for_each(|sample| alone[bin(rank, sample)] += 1));
    let same = bins.slice(0..BINS).get().await? == alone;
    let counted = bins.sum().await?;
    let fullest = bins.reduce(0, Ord::max).await?;
    bins.free().await?;
    match same && counted == (job.size() * samples) as u64 {
        true => Ok(fullest),
        false => Err("the bins differ from the sequential count".into()),
    }
}
