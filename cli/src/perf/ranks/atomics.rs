//! Atomic operations on words of windows, and puts that signal.

use super::*;
use crate::limits;
use std::sync::atomic::{AtomicU64, Ordering};

impl<F: ContextFace> Bench<F> {
    /// Additions to a word of the peer, which adds to it all the time.
    pub(super) async fn fetch_add(&self) -> Result<()> {
        // The word, and further on another one that means "stop".
        let (word, end) = (0, 64);
        let window = self.job.shmalloc::<u64>(128).await?;
        self.barrier().await?;
        let mut added = 0u64;
        let batch_len = if self.maps() { 10_000 } else { 100 };
        let home = Rank(1);
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..batch_len {
                    window.fetch_add(home, word, 1).await?;
                }
                added += batch_len;
                batches.push(batch.elapsed().as_secs_f64() / batch_len as f64 * 1e6);
            }
            window.put(home, end, 1).await?;
            figure(median(&mut batches));
        } else {
            while window.load(end) == Some(0) {
                for _ in 0..batch_len {
                    window.fetch_add(home, word, 1).await?;
                }
                added += batch_len;
            }
        }
        let all = self.job.world().all_reduce_one(added, &posthaste::Reduce::sum()).await?;
        let seen = window.atomic_load(home, word).await?;
        assert_eq!(seen, all, "additions were lost");
        self.barrier().await
    }

    /// Random words of all ranks change by exclusive or; millions a second by all ranks together.
    pub(super) async fn updates(&self) -> Result<()> {
        let words = self.size / 8;
        let ranks = self.job.size();
        let table = self.job.shmalloc::<u64>(words).await?;
        let batch_len = if self.maps() { 100_000 } else { 2_000 };
        let rounds = AtomicU64::new(0);
        let batch = || async {
            rounds.fetch_add(1, Ordering::Relaxed);
            let place = |word: u64| {
                let at = word as usize & (words * ranks - 1);
                (Rank((at >> words.trailing_zeros()) as u32), at & (words - 1))
            };
            let updates = limits::random_words(u64::from(self.me.0)).take(batch_len).map(|word| {
                let (rank, at) = place(word);
                (rank, at, word)
            });
            table.update_each(posthaste::WordUpdate::Xor, updates).await?;
            // All ranks' updates are done, and their number is known: nobody is measured alone.
            Ok(self.job.world().barrier().await?)
        };
        let time = self.repeated(&self.job.world(), batch).await?;
        if rounds.load(Ordering::Relaxed) % 2 == 1 {
            batch().await?;
        }
        // Done an even number of times, every update is undone.
        assert!(table.to_vec().iter().all(|word| *word == 0), "updates were lost");
        if self.leads() {
            figure((batch_len * ranks) as f64 / time);
        }
        self.barrier().await
    }

    /// Half the round trip of a put that adds to a word which the other side awaits.
    pub(super) async fn put_signal(&self) -> Result<()> {
        // A word of data, and beside it the one that counts what has come.
        let (word, count) = (0, 1);
        let window = self.drive(self.job.shmalloc::<u64>(2)).await?;
        self.barrier().await?;
        let mut round = 0u64;
        let batch_len = if self.maps() { 1000 } else { 100 };
        if self.leads() {
            let mut batches = Vec::new();
            let start = Instant::now();
            while start.elapsed() < self.time {
                let batch = Instant::now();
                for _ in 0..batch_len {
                    round += 1;
                    window.put_signal(self.peer, word, &[round], window.signal_add(count, 1)).await?;
                    window.wait_until_on(&self.face, count, |count| count >= round).await?;
                    assert_eq!(window.load(word), Some(round), "a signal was ahead of its put");
                }
                batches.push(batch.elapsed().as_secs_f64() / batch_len as f64 / 2.0 * 1e6);
            }
            window.put_signal(self.peer, word, &[STOP], window.signal_add(count, 1)).await?;
            figure(median(&mut batches));
        } else {
            loop {
                round += 1;
                window.wait_until_on(&self.face, count, |count| count >= round).await?;
                if window.load(word) == Some(STOP) {
                    break;
                }
                window.put_signal(self.peer, word, &[round], window.signal_add(count, 1)).await?;
            }
        }
        self.barrier().await
    }
}
