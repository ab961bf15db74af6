//! The receiving half: from the lanes to the sink.

use super::COPY_FLAG;
use super::tx::Tx;
use crate::inbox::{Inbox, Reading};
use crate::lane::{GRANT_COUNT, KIND_SHORT, LightFence, Look, Peek, WORD_GROUP};
use crate::link::{ClientLink, LIFE_MASK, LaneHome, grant_word};
use posthaste_core::device::{Body, LeaseOwner, Packet, Sink, Verdict};
use posthaste_core::memory::{SharedSlice, SharedWords, Words};
use posthaste_core::{Endpoint, Lease, MAX_INFO, ProtocolId};
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
        Rx {
            inbox: Inbox::new(home.ready_set(home.me), home.endpoints()),
            desk: Desk { scratch: Box::new([0; 2048 / 8 + 2]), info: Box::new([0; MAX_INFO]), fence },
            next: 0,
            fence,
            alone: {
                let personality = home.link.sysdep.personality();
                personality.local_size() == 1 && personality.shape.contexts == 1
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

    /// Drains one lane. Returns the number of packets.
    #[inline]
    pub fn drain(&mut self, source: usize, budget: usize, tx: &mut Tx, sink: &mut dyn Sink) -> usize {
        let Some(lane) = self.inbox.lane(source) else { return 0 };
        let mut count = 0;
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
                    if sink.word(tx, from, ProtocolId(protocol), cookie, payload) == Verdict::Hold {
                        lane.held = true;
                        break;
                    }
                    lane.held = false;
                    if lane.consumer.consume_word(cookie != 0, self.fence) {
                        self.home.ring_if_asleep(from);
                    }
                    // To look at a line that the writer has is to wait for it. Who waits for a message that came alone, and
                    // perhaps answers, comes first.
                    if count == 0 && lane.consumer.begins_line() {
                        count = 1;
                        break;
                    }
                }
                Look::Other => match self.desk.take(lane, &self.home, tx, sink) {
                    Took::One => {}
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

/// Where a packet that is not one word is put together.
struct Desk {
    scratch: Box<[u64; 2048 / 8 + 2]>,
    info: Box<[u8; MAX_INFO]>,
    fence: LightFence,
}

/// What became of the record at a lane's head.
enum Took {
    One,
    /// There is none, or it has to wait.
    Nothing,
    /// The lane is dead.
    Corrupt,
}

impl Desk {
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
        let len = header.len as usize;
        let mut copied = None;
        let (cookie, body) = if header.kind == KIND_SHORT {
            let bytes: &mut [u8] = &mut zerocopy::IntoBytes::as_mut_bytes(&mut scratch[..])[..len];
            let (cookie, ()) = lane.consumer.record(header, info, |ring, at| ring.read_bytes(at, bytes));
            (cookie, Body::Short(bytes))
        } else {
            let (cookie, (offset, word)) = lane.consumer.record(header, info, |ring, at| {
                let order = posthaste_core::sync::Ordering::Relaxed;
                (ring.load(at, order), ring.load(at + 1, order))
            });
            let slice = lane.with.pool.slice(offset, u64::from(header.len));
            let grant = (word >> 40 & 0x1ff) as usize;
            let (Some(slice), true) = (slice, offset.is_multiple_of(4096) && grant < GRANT_COUNT) else {
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
            let lease = Lease::new(slice, lane.with.owner.clone(), grant_word(grant, word & LIFE_MASK));
            if word & COPY_FLAG != 0 {
                let bytes = lease.to_bytes();
                copied = Some(lease);
                (cookie, Body::Owned(bytes))
            } else {
                (cookie, Body::Lease(lease))
            }
        };
        let mut packet = Packet {
            source: from,
            protocol: ProtocolId(header.protocol),
            kind: 0,
            cookie,
            info: &info[..header.info_len as usize],
            body,
        };
        match sink.packet(tx, &mut packet) {
            Verdict::Taken => {
                lane.held = false;
                if lane.consumer.consume(header, *fence) {
                    home.ring_if_asleep(from);
                }
                Took::One
            }
            Verdict::Hold => {
                lane.held = true;
                // The record stays and names the page: the grant must not be returned yet, copied or not.
                match packet.body {
                    Body::Lease(lease) => lease.keep(),
                    _ => copied.into_iter().for_each(Lease::keep),
                }
                Took::Nothing
            }
        }
    }
}

#[cold]
fn corrupt(lane: &mut Reading<SharedWords, Source>, what: &str, sink: &mut dyn Sink) -> Took {
    lane.dead = true;
    let from = lane.with.from;
    tracing::warn!(%from, "{what} in a lane; the peer is cut off");
    sink.corrupt(from.rank);
    Took::Corrupt
}
