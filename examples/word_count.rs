//! Counts the words of a file on N ranks: `word_count [--ranks N] [FILE]`, by default 4 ranks and the README.
//!
//! Rank 0 sends the file in chunks to all ranks; each counts its chunks and sends every word, with its count, to the
//! rank that owns the word; the owners keep a hash table in their parts of a window; rank 0 gets the table.

mod common;

use clap::Parser;
use clap::builder::{PathBufValueParser, TypedValueParser};
use futures::future::try_join_all;
use posthaste::{ActiveMessage, Bytes, Job, MessageStream, Rank, Result, Window};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use zerocopy::FromBytes;

/// Bytes of a chunk of the file; it goes on to the end of its last word.
const CHUNK: usize = 64 << 10;

/// The hash table: slots of (count, place and length of the word's text), free where the count is 0, and the texts.
type Table = (Window<[usize; 3]>, Window<u8>);
type Counts = HashMap<Vec<u8>, usize>;

/// Counts the words of a file on several ranks, and checks the result against a sequential count.
#[derive(Parser)]
#[command(name = "word_count")]
struct Arguments {
    /// Ranks to start, if no launcher does
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// The file; by default this project's README
    #[arg(default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md"), hide_default_value = true)]
    #[arg(value_parser = PathBufValueParser::new().try_map(readable))]
    file: PathBuf,
}

fn main() -> ExitCode {
    common::run(|arguments: Arguments| Ok(count(arguments.ranks, &arguments.file)?))
}

/// Told once, before any rank is started.
fn readable(file: PathBuf) -> Result<PathBuf, String> {
    match std::fs::File::open(&file).and_then(|opened| opened.metadata()) {
        Ok(metadata) if metadata.is_file() => Ok(file),
        Ok(_) => Err("not a regular file".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn count(ranks: u32, file: &Path) -> Result<()> {
    let job = posthaste::join_or_local(ranks).await?;
    let (me, n) = (job.rank(), job.size());
    let (chunk, chunks) = job.stream("chunk")?;
    let (tally, tallies) = job.stream("tally")?;
    job.barrier().await?;
    let start = Instant::now();

    // Sending and receiving go on at once: who only sent would wait for the room that receiving makes.
    let (whole, counts) = tokio::try_join!(send_file(&job, &chunk, file), count_chunks(chunks))?;

    // Each owner learns how many words and bytes of text its part of the table will hold at most.
    let mut needs = vec![[0; 2]; n];
    for word in counts.keys() {
        let [words, bytes] = &mut needs[place(word, n).0.index()];
        (*words, *bytes) = (*words + 1, *bytes + word.len());
    }
    let needs: Vec<[usize; 2]> = job.world().all_gather(&needs).await?; // n of each rank, one after the other
    let need = |at| needs.iter().skip(me.index()).step_by(n).map(|need: &[usize; 2]| need[at]).sum::<usize>();
    let table: Table = (job.shmalloc(2 * need(0)).await?, job.shmalloc(need(1)).await?);

    tokio::try_join!(send_counts(&job, &tally, counts), fill_table(&job, tallies, &table))?;
    job.barrier().await?;
    let (s, time) = (job.stats(), start.elapsed().as_micros() as u64);
    let figures = [s.messages_sent, s.bytes_sent, s.messages_received, s.bytes_received, time];
    let figures = job.world().all_gather(&[figures]).await?;
    if me == Rank(0) {
        report(&job, &table, &whole).await?;
        common::say!("\nrank   msgs sent   bytes sent   msgs recv   bytes recv      time/us");
        for (rank, [sent, bytes, received, bytes_in, us]) in figures.iter().enumerate() {
            common::say!("{rank:>4} {sent:>11} {bytes:>12} {received:>11} {bytes_in:>12} {us:>12}");
        }
    }
    job.barrier().await?; // nobody leaves while rank 0 reads its part
    job.leave().await
}

/// Rank 0 sends the file to all ranks in turn, cut at white space, then an empty chunk to each.
async fn send_file(job: &Job, chunk: &ActiveMessage, file: &Path) -> Result<Bytes> {
    if job.rank() != Rank(0) {
        return Ok(Bytes::new());
    }
    let whole = Bytes::from(std::fs::read(file)?);
    let (mut rest, mut to) = (whole.clone(), Rank(0));
    while !rest.is_empty() {
        let end = CHUNK.min(rest.len());
        let cut = rest[end..].iter().position(u8::is_ascii_whitespace).map_or(rest.len(), |more| end + more);
        chunk.send(to, rest.split_to(cut)).await?;
        to = to.next(job.size());
    }
    try_join_all(job.ranks().map(|rank| chunk.send(rank, ""))).await?;
    Ok(whole)
}

async fn count_chunks(mut chunks: MessageStream) -> Result<Counts> {
    let mut counts = Counts::new();
    while let Some(chunk) = chunks.recv().await.filter(|chunk| !chunk.is_empty()) {
        count_words(&chunk.into_bytes(), &mut counts);
    }
    Ok(counts)
}

/// Sends every word to its owner, the count as message info, then an empty message to each.
async fn send_counts(job: &Job, tally: &ActiveMessage, counts: Counts) -> Result<()> {
    for (word, count) in counts {
        tally.send(place(&word, job.size()).0, word).info(&count.to_ne_bytes()).await?;
    }
    try_join_all(job.ranks().map(|rank| tally.send(rank, ""))).await?;
    Ok(())
}

/// Enters what the ranks send into this rank's part of the table: open addressing, the texts one after the other.
async fn fill_table(job: &Job, mut tallies: MessageStream, (table, text): &Table) -> Result<()> {
    let (me, mut senders, mut used) = (job.rank(), job.size(), 0);
    while senders > 0 {
        let Some(tally) = tallies.recv().await else { break };
        if tally.is_empty() {
            senders -= 1;
            continue;
        }
        let (count, word) = (usize::read_from_bytes(tally.info()).unwrap_or(0), tally.into_bytes());
        let mut at = place(&word, job.size()).1 % table.len(me);
        let (sum, first) = loop {
            match table.load(at).unwrap_or_default() {
                [0, ..] => break (0, used),
                [sum, first, len] if text.get_slice(me, first, len).await? == word => break (sum, first),
                _ => at = (at + 1) % table.len(me),
            }
        };
        assert!(table.store(at, [sum + count, first, word.len()]), "the slot was found in this part");
        if sum == 0 {
            used += word.len();
            text.put_bytes(me, first, word).await?;
        }
    }
    Ok(())
}

/// Gets the whole table; prints the most frequent words and the total, which must be what a sequential count gives.
async fn report(job: &Job, (table, text): &Table, whole: &[u8]) -> Result<()> {
    let mut counts = Counts::new();
    for rank in job.ranks() {
        let slots = table.get_slice(rank, 0, table.len(rank)).await?;
        let text = text.get_slice(rank, 0, text.len(rank)).await?;
        for [count, first, len] in slots.into_iter().filter(|slot| slot[0] > 0) {
            counts.insert(text[first..][..len].to_vec(), count);
        }
    }
    let mut order: Vec<_> = counts.iter().collect();
    order.sort_unstable_by_key(|(word, count)| (Reverse(**count), *word));
    for (word, count) in order.iter().take(10) {
        common::say!("{count:>9}  {:.60}", String::from_utf8_lossy(word).escape_debug().to_string());
    }
    let mut sequential = Counts::new();
    count_words(whole, &mut sequential);
    if sequential != counts {
        return Err(std::io::Error::other("the table differs from the sequential count").into());
    }
    common::say!("\ntotal {} words: matches the sequential count", counts.values().sum::<usize>());
    Ok(())
}

fn count_words(text: &[u8], counts: &mut Counts) {
    for word in text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()) {
        *counts.entry(word.to_vec()).or_default() += 1;
    }
}

/// The rank that owns a word, and where in its part of the table (modulo the length) the search for it begins.
fn place(word: &[u8], ranks: usize) -> (Rank, usize) {
    let mut hasher = DefaultHasher::new();
    word.hash(&mut hasher);
    let hash = hasher.finish() as usize;
    (Rank((hash % ranks) as u32), hash / ranks)
}
