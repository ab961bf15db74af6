//! The receiving half: from the lanes to the sink.

use super::COPY_FLAG;
use super::tx::Tx;
use crate::batch::Batch;
use crate::inbox::{Inbox, Reading};
use crate::lane::{
    GRANT_COUNT, Header, KIND_BATCH, KIND_SHORT, KIND_WORDS, LightFence, Look, MOST_WORDS, Peek, WORD_GROUP,
};
use crate::link::{ClientLink, LIFE_MASK, LaneHome, grant_number, grant_word};
use crate::pages::longest_page;
use bytes::Bytes;
use posthaste_core::body::LentPage;
use posthaste_core::device::{Body, LeaseOwner, Packet, Payloads, Sink, Verdict};
use posthaste_core::memory::{SharedSlice, SharedWords, Words};
use posthaste_core::protocol::ArrivedWord;
use posthaste_core::sync::spin_loop;
use posthaste_core::{Endpoint, MAX_INFO, ProtocolId, Rank};
use std::sync::Arc;

/// Bytes of a page that are asked for as soon as its record is seen.
const PREFETCH: usize = 4096;
/// A longer page is read for so long that its reader fetches ahead in any case: of it only the start is asked for, and the end.
const LONG: usize = 256 << 10;
const PREFETCH_LONG: usize = 512;

/// Words that are worth being taken together.
const MANY: usize = 8;
/// Words that are taken one by one after fewer were found together.
const SINGLES: u32 = 256;

/// The receiving half.
pub(super) struct Rx {
    pub home: Arc<ClientLink>,
    pub inbox: Inbox<SharedWords, Source>,
    desk: Desk,
    /// Which lane is first this time.
    pub next: usize,
    fence: LightFence,
    /// No other endpoint writes to this arena.
    pub alone: bool,
    leaves: Leaves,
}

/// What is known of clients of other processes that have left.
struct Leaves {
    /// How many leaves the arena had counted when it was last looked at.
    heard: u64,
    /// Some were not told yet.
    again: bool,
    /// By rank: this client of it has left, and the engine was told.
    told: Vec<bool>,
}

/// What is kept with each lane that is read.
pub(super) struct Source {
    from: Endpoint,
    /// The sender's page pool.
    pool: SharedSlice,
    /// Takes leases back.
    owner: Arc<dyn LeaseOwner>,
}

impl Rx {
    pub fn new(home: Arc<ClientLink>) -> Rx {
        let fence = home.link.fence;
        let mut inbox = Inbox::new(home.ready_set(home.me), home.endpoints());
        if home.link.may_miss_rings {
            inbox.keep_all();
        }
        Rx {
            inbox,
            desk: Desk { scratch: Box::new(Scratch([0; SCRATCH])), info: Box::new([0; MAX_INFO]), fence },
            next: 0,
            fence,
            alone: {
                let personality = home.link.sysdep.personality();
                personality.local_size() == 1 && personality.shape.contexts == 1
            },
            leaves: Leaves {
                heard: 0,
                again: false,
                told: vec![false; home.link.sysdep.personality().shape.ranks as usize],
            },
            home,
        }
    }

    /// Looks which lanes have become ready.
    #[cold]
    pub fn collect(&mut self) {
        let home = &self.home;
        self.inbox.collect(|source| {
            let from = home.endpoint(source);
            let (control, ring) = home.lane(from, home.me);
            home.link.watch(from.rank);
            let pool = home.link.arena.part(home.link.arena.layout().pool(home.client, from));
            let link = home.clone();
            let owner: Arc<dyn LeaseOwner> = Arc::new(LaneHome { link, from, control });
            (control, ring, Source { from, pool, owner })
        });
    }

    /// Whether clients may have left that the engine was not told of.
    #[inline]
    pub fn is_told_of_leaves(&self) -> bool {
        self.leaves.again || self.leaves.heard != self.home.link.arena.leaves()
    }

    /// How many leaves the arena had counted when it was last looked at.
    pub fn leaves_heard(&self) -> u64 {
        self.leaves.heard
    }

    /// Looks which clients have left since the last look. Returns how many.
    #[cold]
    pub fn hear_of_leaves(&mut self, sink: &mut dyn Sink) -> usize {
        let Rx { home, inbox, leaves: Leaves { heard, again, told }, .. } = self;
        let ClientLink { link, client, .. } = &**home;
        // First the count: who leaves after this look is counted later, too.
        *heard = link.arena.leaves();
        // A lane that nobody has looked at yet may be theirs.
        *again = inbox.is_announced();
        if *again {
            return 0;
        }
        let mut found = 0;
        for (index, told) in told.iter_mut().enumerate() {
            let rank = Rank(index as u32);
            if *told || rank == link.me || !link.is_local(rank) || !link.arena.has_left(rank, *client) {
                continue;
            }
            // What it sent comes first; behind a record that waits for something here there may be answers.
            if (0..home.endpoints()).any(|lane| home.endpoint(lane).rank == rank && inbox.is_unread(lane)) {
                *again = true;
                continue;
            }
            *told = true;
            found += 1;
            // Who is started again under a number does not share memory: it can only be the first incarnation.
            sink.left(rank, 0);
        }
        found
    }

    /// Drains one lane. Returns the number of packets.
    #[inline(always)]
    pub fn drain(&mut self, source: usize, budget: usize, tx: &mut Tx, sink: &mut dyn Sink) -> usize {
        let Some(lane) = self.inbox.lane(source) else { return 0 };
        if lane.dead || budget == 0 {
            return 0;
        }
        match lane.consumer.look() {
            Look::Empty => {
                lane.quiet = lane.quiet.saturating_add(1);
                0
            }
            look => match take_first(lane, look, self.fence, &self.home, tx, sink) {
                First::Only(count) => count,
                First::More(count) => self.drain_on(source, count, budget, tx, sink),
            },
        }
    }

    /// Looks up to `looks` times at one lane, and drains what is seen then and there: who waits for a message asks nothing
    /// between seeing it and taking it.
    #[inline(always)]
    pub fn linger(
        &mut self,
        source: usize,
        looks: u32,
        budget: usize,
        tx: &mut Tx,
        sink: &mut dyn Sink,
    ) -> Lingered {
        let Some(lane) = self.inbox.lane(source) else { return Lingered::Blind };
        if lane.held || lane.dead || budget == 0 {
            return Lingered::Blind;
        }
        for looked in 0..looks {
            match lane.consumer.look() {
                Look::Empty => spin_loop(),
                look => {
                    // Who waited for it answers as a rule, and is not to wait then for the line that the other side looks
                    // at: it is on its way while the message is handled. What a stream brings was there at the first look.
                    if looked > 0 {
                        tx.expect(source);
                        if look == Look::Other {
                            tx.expect_loan(source);
                        }
                    }
                    return Lingered::Drained(
                        match take_first(lane, look, self.fence, &self.home, tx, sink) {
                            First::Only(count) => count,
                            First::More(count) => self.drain_on(source, count, budget, tx, sink),
                        },
                    );
                }
            }
        }
        Lingered::InVain
    }

    /// As [`drain`](Self::drain), for one of several lanes.
    #[inline(never)]
    pub fn drain_one(&mut self, source: usize, budget: usize, tx: &mut Tx, sink: &mut dyn Sink) -> usize {
        self.drain(source, budget, tx, sink)
    }

    /// Goes on with a lane that `count` packets were taken of.
    #[inline(never)]
    fn drain_on(
        &mut self,
        source: usize,
        mut count: usize,
        budget: usize,
        tx: &mut Tx,
        sink: &mut dyn Sink,
    ) -> usize {
        let Some(lane) = self.inbox.lane(source) else { return count };
        while count < budget && !lane.dead {
            match lane.consumer.look() {
                Look::Empty => break,
                Look::Word { protocol, cookie: 0, .. } if lane.singles == 0 => {
                    let from = lane.with.from;
                    let mut payloads = [0; WORD_GROUP];
                    let found = lane.consumer.words(protocol, &mut payloads).min(budget - count);
                    // A reader that has caught up with the writer would only get into its way: to look ahead is to fetch
                    // lines that are being written.
                    lane.singles = if found < MANY { SINGLES } else { 0 };
                    let taken = sink.words(tx, from, ProtocolId(protocol), &payloads[..found]);
                    lane.held = taken < found;
                    if lane.consumer.consume_words(taken, self.fence) {
                        self.home.ring_if_asleep(from);
                    }
                    count += taken;
                    if lane.held {
                        break;
                    }
                    continue;
                }
                Look::Word { protocol, cookie, payload } => {
                    lane.singles = lane.singles.saturating_sub(1);
                    let from = lane.with.from;
                    let mut word = ArrivedWord::new(from, ProtocolId(protocol), cookie, payload);
                    if sink.word(tx, &mut word) == Verdict::Hold {
                        lane.held = true;
                        break;
                    }
                    lane.held = false;
                    if lane.consumer.consume_word(cookie != 0, self.fence) {
                        self.home.ring_if_asleep(from);
                    }
                    // As in `take_first`.
                    if count == 0 && lane.consumer.begins_line() {
                        count = 1;
                        break;
                    }
                }
                Look::Short { protocol, cookie, len } => {
                    if !self.desk.take_short(lane, (protocol, cookie, len), &self.home, tx, sink) {
                        break;
                    }
                }
                Look::Other => match self.desk.take(lane, &self.home, tx, sink) {
                    Took::One => {}
                    Took::Several(header) => {
                        let header = Header::unpack(header);
                        let take =
                            if header.kind == KIND_WORDS { Desk::take_words } else { Desk::take_batch };
                        count += take(&mut self.desk, lane, header, &self.home, tx, sink, budget - count);
                        if lane.held || lane.dead {
                            break;
                        }
                        continue;
                    }
                    Took::Nothing => break,
                    Took::Corrupt => return count + 1,
                },
            }
            count += 1;
        }
        lane.quiet = if count == 0 { lane.quiet.saturating_add(1) } else { 0 };
        count
    }
}

/// What became of looks at one lane.
pub(super) enum Lingered {
    /// They were in vain.
    InVain,
    /// So many packets were taken.
    Drained(usize),
    /// A look at it would tell nothing.
    Blind,
}

/// How many packets were taken at once of the lane whose head was looked at.
enum First {
    /// There are no more.
    Only(usize),
    /// There may be.
    More(usize),
}

/// Takes what a look at the lane's head has found, if it is one word that came alone: as a rule it is, and somebody waits
/// for the answer.
#[inline(always)]
fn take_first(
    lane: &mut Reading<SharedWords, Source>,
    look: Look,
    fence: LightFence,
    home: &Arc<ClientLink>,
    tx: &mut Tx,
    sink: &mut dyn Sink,
) -> First {
    let Look::Word { protocol, cookie, payload } = look else { return First::More(0) };
    // Those with a cookie are never taken together.
    if cookie == 0 {
        if lane.singles == 0 {
            return First::More(0);
        }
        lane.singles -= 1;
    }
    let from = lane.with.from;
    let mut word = ArrivedWord::new(from, ProtocolId(protocol), cookie, payload);
    lane.held = sink.word(tx, &mut word) == Verdict::Hold;
    if lane.held {
        return First::Only(0);
    }
    lane.quiet = 0;
    if lane.consumer.consume_word(cookie != 0, fence) {
        home.ring_if_asleep(from);
    }
    // To look at a line that the writer has is to wait for it. Who waits for a message that came alone, and perhaps answers,
    // comes first.
    if lane.consumer.begins_line() || !lane.consumer.has_any() { First::Only(1) } else { First::More(1) }
}

/// Words of the longest payload of a record, and two more; or of the payloads of one that has several.
const SCRATCH: usize = {
    let short = 2048 / 8 + 2;
    if short > MOST_WORDS { short } else { MOST_WORDS }
};

/// Room for one payload. It begins with a cache line: the widest stores of a copy would else write to two each.
#[repr(C, align(64))]
struct Scratch([u64; SCRATCH]);

/// Where a packet that is not one word is put together.
struct Desk {
    scratch: Box<Scratch>,
    info: Box<[u8; MAX_INFO]>,
    fence: LightFence,
}

/// What became of the record at a lane's head.
enum Took {
    One,
    /// It has, or names, several messages, which [`Desk::take_words`] or [`Desk::take_batch`] takes: its header, in one word, as to
    /// read at once what was written in pieces takes longer.
    Several(u64),
    /// There is none, or it has to wait.
    Nothing,
    /// The lane is dead.
    Corrupt,
}

impl Desk {
    /// Takes the record at the lane's head, of which [`Look::Short`] has said this much; false: it has to wait.
    #[inline]
    fn take_short(
        &mut self,
        lane: &mut Reading<SharedWords, Source>,
        (protocol, cookie, len): (u16, Option<u64>, usize),
        home: &Arc<ClientLink>,
        tx: &mut Tx,
        sink: &mut dyn Sink,
    ) -> bool {
        let from = lane.with.from;
        let bytes: &mut [u8] = &mut zerocopy::IntoBytes::as_mut_bytes(&mut self.scratch.0[..])[..len];
        lane.consumer.payload(cookie.is_some(), bytes);
        let body = Body::Short(bytes);
        lane.held = sink.plain(tx, from, ProtocolId(protocol), cookie.unwrap_or(0), body) == Verdict::Hold;
        if !lane.held && lane.consumer.consume_short(cookie.is_some(), len, self.fence) {
            home.ring_if_asleep(from);
        }
        !lane.held
    }

    /// Takes the record at the lane's head, whatever it is.
    #[inline(never)]
    fn take(
        &mut self,
        lane: &mut Reading<SharedWords, Source>,
        home: &Arc<ClientLink>,
        tx: &mut Tx,
        sink: &mut dyn Sink,
    ) -> Took {
        let Desk { scratch, info, fence } = self;
        let from = lane.with.from;
        let header = match lane.consumer.peek() {
            Peek::Empty => return Took::Nothing,
            Peek::Record(header) => header,
            Peek::Corrupt => return corrupt(lane, "impossible record", sink),
        };
        if matches!(header.kind, KIND_BATCH | KIND_WORDS) {
            return Took::Several(header.pack());
        }
        let len = header.len as usize;
        let protocol = ProtocolId(header.protocol);
        let info_len = usize::from(header.info_len);
        let mut offer = |info: &[u8], cookie, body| {
            if info.is_empty() {
                return sink.plain(tx, from, protocol, cookie, body);
            }
            sink.packet(tx, &mut Packet { source: from, protocol, kind: 0, cookie, info, body })
        };
        let verdict = if header.kind == KIND_SHORT {
            let bytes: &mut [u8] = &mut zerocopy::IntoBytes::as_mut_bytes(&mut scratch.0[..])[..len];
            let (cookie, ()) = lane.consumer.record(header, info, |ring, at| ring.read_bytes(at, bytes));
            offer(&info[..info_len], cookie, Body::Short(bytes))
        } else {
            let (cookie, [offset, word]) = lane.consumer.record(header, info, words_at);
            let Some((slice, page)) = granted(&lane.with, offset, u64::from(header.len), word) else {
                return corrupt(lane, "impossible page", sink);
            };
            // The handler is going to look at it; until then its first lines can be on their way.
            if len <= LONG {
                slice.prefetch(PREFETCH);
            } else if let Some(end) = slice.slice(u64::from(header.len) - 1, 1) {
                // A processor waits for a dozen lines at a time: the end comes before the rest of the start.
                end.prefetch(1);
                slice.prefetch(PREFETCH_LONG);
            }
            lane.consumer.expect_return(grant_number(word));
            let info = &info[..info_len];
            let verdict = if word & COPY_FLAG != 0 {
                let bytes = lane.copy.take().unwrap_or_else(|| Bytes::from(slice.to_vec()));
                let verdict = offer(info, cookie, Body::Owned(&bytes));
                if verdict == Verdict::Hold {
                    lane.copy = Some(bytes);
                }
                verdict
            } else {
                offer(info, cookie, page.lend(slice))
            };
            // A record that stays names the page: the grant must not be returned yet, copied or not.
            if verdict == Verdict::Taken {
                page.end();
            }
            verdict
        };
        lane.held = verdict == Verdict::Hold;
        if lane.held {
            return Took::Nothing;
        }
        if lane.consumer.consume(header, *fence) {
            home.ring_if_asleep(from);
        }
        Took::One
    }
}

impl Desk {
    /// Takes messages of the words that the record at the lane's head has, up to `budget`, which is not 0. Returns how many
    /// events that were.
    #[inline(never)]
    fn take_words(
        &mut self,
        lane: &mut Reading<SharedWords, Source>,
        header: Header,
        home: &Arc<ClientLink>,
        tx: &mut Tx,
        sink: &mut dyn Sink,
        budget: usize,
    ) -> usize {
        let (from, protocol) = (lane.with.from, ProtocolId(header.protocol));
        let (first, all) = (lane.batched as usize, header.len as usize / 8);
        let found = all.saturating_sub(first).min(budget).min(MOST_WORDS);
        if found == 0 {
            // It had more before.
            corrupt(lane, "impossible words", sink);
            return 1;
        }
        // Not memory of its own, which would have to be cleared first.
        let payloads = &mut self.scratch.0[..found];
        lane.consumer.prefetch_next_head(header);
        lane.consumer.record(header, &mut self.info, |ring, at| {
            ring.read_bytes(at + first, zerocopy::IntoBytes::as_mut_bytes(&mut *payloads));
        });
        // The next record comes while handlers look at this one.
        lane.consumer.prefetch_next(header);
        let taken = sink.words(tx, from, protocol, payloads);
        lane.held = taken < found;
        lane.batched += taken as u64;
        if first + taken == all {
            lane.batched = 0;
            if lane.consumer.consume(header, self.fence) {
                home.ring_if_asleep(from);
            }
        }
        taken
    }

    /// Takes messages of the batch that the record at the lane's head names, up to `budget`, which is not 0. Returns how many
    /// events that were.
    #[inline(never)]
    fn take_batch(
        &mut self,
        lane: &mut Reading<SharedWords, Source>,
        header: Header,
        home: &Arc<ClientLink>,
        tx: &mut Tx,
        sink: &mut dyn Sink,
        budget: usize,
    ) -> usize {
        let (from, protocol) = (lane.with.from, ProtocolId(header.protocol));
        let (_, [offset, word, count]) = lane.consumer.record(header, &mut self.info, words_at);
        let batch = Batch::new(count, u64::from(header.len)).filter(|batch| lane.batched < batch.count());
        let page = batch.and_then(|batch| Some((batch, granted(&lane.with, offset, batch.bytes(), word)?)));
        let Some((batch, (memory, page))) = page else {
            corrupt(lane, "impossible batch", sink);
            return 1;
        };
        memory.prefetch(PREFETCH);
        let first = lane.batched;
        let end = batch.count().min(first + budget as u64);
        let mut payloads = OneByOne { batch, memory, next: first, end, scratch: &mut self.scratch.0[..] };
        sink.batch(tx, from, protocol, &mut payloads);
        lane.batched = payloads.next;
        lane.held = lane.batched < end;
        let taken = (lane.batched - first) as usize;
        if lane.batched < batch.count() {
            // The record stays and names the page.
            return taken;
        }
        lane.batched = 0;
        page.end();
        if lane.consumer.consume(header, self.fence) {
            home.ring_if_asleep(from);
        }
        taken
    }
}

/// The payloads of a batch: each is copied to private memory when it is its turn.
struct OneByOne<'a> {
    batch: Batch,
    memory: SharedSlice,
    next: u64,
    end: u64,
    scratch: &'a mut [u64],
}

impl Payloads for OneByOne<'_> {
    fn next(&mut self) -> Option<&[u8]> {
        let OneByOne { batch, memory, next, end, scratch } = self;
        let payload = batch.payload(memory, *next).filter(|_| *next < *end)?;
        // Copies of this length are too short for the processor to see that they are one behind the other.
        if let Some(ahead) = memory.slice(*next * batch.stride() + PREFETCH as u64, payload.len() as u64) {
            ahead.prefetch(payload.len());
        }
        let bytes = &mut zerocopy::IntoBytes::as_mut_bytes(&mut **scratch)[..payload.len()];
        payload.read(bytes);
        *next += 1;
        Some(bytes)
    }

    fn put_back(&mut self) {
        self.next -= 1;
    }
}

/// The words of a record's body.
fn words_at<const N: usize>(ring: &SharedWords, at: usize) -> [u64; N] {
    std::array::from_fn(|word| ring.load(at + word, posthaste_core::sync::Ordering::Relaxed))
}

/// The part of a page that a record names, and what gives it back; `None` if there is no such page or grant.
fn granted(from: &Source, offset: u64, len: u64, word: u64) -> Option<(SharedSlice, LentPage<'_>)> {
    let slice = from.pool.slice(offset, len)?;
    let grant = grant_number(word);
    let fits = len <= longest_page(from.pool.len() as u64);
    let known = offset.is_multiple_of(4096) && grant < GRANT_COUNT && fits;
    known.then(|| (slice, LentPage::new(&from.owner, grant_word(grant, word & LIFE_MASK))))
}

#[cold]
fn corrupt(lane: &mut Reading<SharedWords, Source>, what: &str, sink: &mut dyn Sink) -> Took {
    lane.dead = true;
    lane.copy = None;
    let from = lane.with.from;
    tracing::warn!(%from, "{what} in a lane; the peer is cut off");
    sink.corrupt(from.rank);
    Took::Corrupt
}
