//! Payloads that go straight to where they belong: where a protocol wants a long message, and memory that is given to a get.

mod support;

use bytes::Bytes;
use posthaste_core::engine::{Payload, Rma};
use posthaste_core::memory::SharedSlice;
use posthaste_core::protocol::{FirstPacket, Flow, Incoming, Protocol};
use posthaste_core::{Messager, Rank, Scope, Value};
use posthaste_tcp::{Limits, Mode};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::job::{LOG, MEMORY, Member, at, job};

/// Wants long messages in pieces of growing length, every other one of no bytes, with gaps in between.
struct Spread {
    memory: SharedSlice,
    placed: Arc<AtomicUsize>,
}

impl Spread {
    fn pieces(&self, total: u64) -> Vec<SharedSlice> {
        let (mut offset, mut left, mut pieces) = (3, total, Vec::new());
        for number in 0.. {
            let now = if number % 2 == 1 { 0 } else { (number * 37 + 1).min(left) };
            pieces.push(self.memory.slice(offset, now).expect("inside"));
            offset += now + 5;
            left -= now;
            if left == 0 {
                return pieces;
            }
        }
        unreachable!("the numbers end later")
    }
}

impl Protocol for Spread {
    fn name(&self) -> &str {
        "spread"
    }

    fn flow(&self) -> Flow {
        Flow::Replied
    }

    fn place(&self, first: &FirstPacket<'_>) -> Option<Vec<SharedSlice>> {
        match first.info {
            b"panic" => panic!("a defect of the protocol"),
            b"elsewhere" => None,
            // Not as many bytes as there are: it is not listened to.
            b"too few" => Some(self.pieces(first.total - 1)),
            _ => Some(self.pieces(first.total)),
        }
    }

    fn on_placed(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        self.placed.fetch_add(1, Ordering::Relaxed);
        assert!(message.body.is_empty());
        let total = u64::from_le_bytes(message.info.try_into().expect("the length"));
        let bytes: Vec<u8> = self.pieces(total).iter().flat_map(SharedSlice::to_vec).collect();
        scope.reply(message.reply().expect("it is a request"), Ok(Payload::Owned(bytes.into())));
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        let to = message.reply().expect("it is a request");
        scope.reply(to, Ok(Payload::Owned(message.body.to_bytes())));
    }
}

async fn spreading(members: &[Member]) -> (u16, Arc<AtomicUsize>) {
    let placed = Arc::new(AtomicUsize::new(0));
    let mut ids = Vec::new();
    for (rank, member) in members.iter().enumerate() {
        let own = member.device.allocate(512 << 10).expect("there is room");
        use posthaste_core::Device;
        let memory = member.device.map(Rank(rank as u32), own.offset, own.len).expect("its own");
        let spread = Spread { memory, placed: placed.clone() };
        ids.push(member.client.register(Arc::new(spread)).expect("the name is free"));
    }
    assert_eq!(ids[0], ids[1]);
    (ids[0].0, placed)
}

#[tokio::test]
async fn long_messages_go_where_their_protocol_wants_them() {
    for mode in [Mode::HandshakeOnly, Mode::Encrypted] {
        let (members, log) = job(2, mode, Limits::default()).await;
        let (spread, placed) = spreading(&members).await;
        let ask = async |info: &[u8], bytes: &[u8]| {
            let asked = members[0].send(1, spread, info, bytes, true).await.expect("it lives");
            members[0].ends(asked.expect("it is a request")).await
        };
        let bytes: Vec<u8> = (0..300_000u32).map(|at| (at * 7 + (at >> 8)) as u8).collect();
        // The first one is looked up by its name, and comes whole.
        let first = ask(&[], &bytes[..20_000]).await.expect("it is answered");
        assert!(first.as_bytes() == &bytes[..20_000] && placed.load(Ordering::Relaxed) == 0);
        let mut expected = 0;
        for len in [100, 5_000, 16 << 10, 16_385, 70_001, 131_072, 300_000] {
            // What is sent behind it arrives behind it.
            let info = (len as u64).to_le_bytes();
            let answer = ask(&info, &bytes[..len]).await.expect("it is answered");
            assert!(answer.as_bytes() == &bytes[..len], "{len} bytes, {mode:?}");
            expected += usize::from(len >= 16 << 10);
            assert_eq!(placed.load(Ordering::Relaxed), expected, "{len} bytes, {mode:?}");
            members[0].send(1, LOG, &info, b"behind", false).await.expect("it lives");
        }
        for info in [&b"panic"[..], b"elsewhere", b"too few"] {
            let answer = ask(info, &bytes[..50_000]).await.expect("it is answered");
            assert!(answer.as_bytes() == &bytes[..50_000], "{info:?}");
        }
        assert_eq!(placed.load(Ordering::Relaxed), expected);
        assert_eq!(log.of(at(0), at(1)).len(), 7);
    }
}

/// Half of a long message comes, and then its sender is gone: nothing is told of it, and the others go on.
#[tokio::test]
async fn what_breaks_off_is_not_told_to_the_protocol() {
    let (mut members, _log) = job(3, Mode::HandshakeOnly, Limits::default()).await;
    let (spread, placed) = spreading(&members).await;
    members[0].send(1, spread, &[], &[1; 100], true).await.expect("it lives");
    // More than sockets hold, of which the other side reads what there is.
    let info = 4u64.to_le_bytes();
    for _ in 0..40 {
        let bytes = Bytes::from(vec![3; 300_000]);
        members[0]
            .enter(|scope| {
                let ticket = scope.operation(Some(Rank(1))).expect("it lives");
                let args = posthaste_core::engine::SendArgs {
                    target: at(1),
                    protocol: posthaste_core::ProtocolId(spread),
                    cookie: ticket.to_word(),
                    info: &info,
                    relaxed: false,
                };
                let wait = posthaste_core::engine::Wait::Never;
                drop(scope.send(&args, Payload::Owned(bytes.clone()), wait));
            })
            .await;
    }
    drop(members.remove(0));
    let asked = members[1].send(1, spread, &[], &[2; 100], true).await.expect("it lives");
    let answer = members[1].ends(asked.expect("it is a request")).await.expect("it lives");
    assert!(answer.as_bytes() == [2; 100]);
    assert!(placed.load(Ordering::Relaxed) <= 40);
}

/// The value of a long get is in the memory that was given for it; what is too small is not used.
#[tokio::test]
async fn a_get_fills_the_memory_that_it_was_given() {
    for mode in [Mode::HandshakeOnly, Mode::Encrypted] {
        let limits = Limits { get_chunk: 10_000, ..Limits::default() };
        let (members, _log) = job(2, mode, limits).await;
        let all: Vec<u8> = (0..MEMORY as u32).map(|at| (at * 5 + (at >> 8)) as u8).collect();
        members[0].access(&members[1], 1, 0, support::job::Access::Put(&all)).await.expect("it lives");
        let remote = members[1].memory_of_rank(1);
        let key = members[0].enter(|scope| scope.table().remote.insert(remote)).await;
        for (len, capacity) in [(100_000, 100_000), (100_000, 120_000), (100_000, 99_999), (8, 5_000), (0, 8)]
        {
            let memory = vec![9; capacity];
            let place = memory.as_ptr();
            let mut memory = Some(memory);
            let ticket = members[0]
                .enter(|scope| {
                    let rma = Rma::GetGiven(memory.take().expect("entered once"), len);
                    scope.rma(at(1), key, 77, rma).expect("it is started").expect("it has a value")
                })
                .await;
            let value = members[0].ends(ticket).await.expect("it lives");
            assert!(value.as_bytes() == &all[77..][..len as usize], "{len} bytes into {capacity}");
            let Value::Bytes(bytes) = value else {
                assert!(len <= 8);
                continue;
            };
            if capacity as u64 >= len {
                assert!(bytes.as_ptr() == place, "it is not in the memory that was given");
            }
        }
    }
}

/// Many long puts under way at once, and then as many gets: each is whole, and all of them end.
#[tokio::test]
async fn rows_of_long_puts_and_gets_are_whole() {
    const LEN: u64 = 20_000;
    const PLACES: u64 = MEMORY / LEN;
    const COUNT: u64 = 20 * PLACES;
    for mode in [Mode::HandshakeOnly, Mode::Encrypted] {
        let (members, _log) = job(2, mode, Limits::default()).await;
        let remote = members[1].memory_of_rank(1);
        let key = members[0].enter(|scope| scope.table().remote.insert(remote)).await;
        let bytes = |number: u64| Bytes::from(vec![number as u8 + 1; LEN as usize]);
        let mut tickets = Vec::new();
        for number in 0..COUNT {
            let mut payload = Some(bytes(number));
            let started = members[0]
                .enter(|scope| {
                    let put = Rma::Put(Payload::Owned(payload.take().expect("entered once")));
                    scope.rma(at(1), key, number % PLACES * LEN, put).expect("it is started")
                })
                .await;
            tickets.extend(started);
        }
        for ticket in tickets.drain(..) {
            members[0].ends(ticket).await.expect("it lives");
        }
        for place in 0..PLACES {
            let there = &members[1].memory(1)[(place * LEN) as usize..][..LEN as usize];
            assert!(there == bytes(COUNT - PLACES + place), "{mode:?}");
        }
        for number in 0..COUNT {
            let started = members[0]
                .enter(|scope| {
                    let get = Rma::GetGiven(Vec::with_capacity(LEN as usize), LEN);
                    scope.rma(at(1), key, number % PLACES * LEN, get).expect("it is started")
                })
                .await;
            tickets.extend(started);
        }
        assert_eq!(tickets.len() as u64, COUNT, "each has a value");
        for (number, ticket) in tickets.into_iter().enumerate() {
            let value = members[0].ends(ticket).await.expect("it lives");
            let expected = bytes(COUNT - PLACES + number as u64 % PLACES);
            assert!(value.as_bytes() == expected, "{mode:?}");
        }
    }
}
