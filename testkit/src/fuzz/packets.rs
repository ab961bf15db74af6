//! What dispatch makes of packets of any kind and content.

use super::Input;
use bytes::{Bytes, BytesMut};
use posthaste_core::descriptor::Op;
use posthaste_core::device::{
    Allocation, Body, Inject, Injected, Loan, Memory, Packet, Port, Sink, Sources, Stop, Verdict,
};
use posthaste_core::engine::{EngineConfig, EngineParts, Gates, Work};
use posthaste_core::exposed::{Exposed, ExposedMemory};
use posthaste_core::inprocess::Arena;
use posthaste_core::memory::SharedSlice;
use posthaste_core::protocol::{Accept, ArrivedWord, FirstPacket, Incoming, Registry};
#[cfg(test)]
use posthaste_core::slot::SlotPool;
use posthaste_core::sync::LightFence;
use posthaste_core::wire;
use posthaste_core::{
    Caps, ContextId, Descriptor, Endpoint, Engine, Fault, Flow, JobShape, MAX_INFO, MemoryError, Payload,
    Protocol, ProtocolId, Rank, Scope,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use zerocopy::IntoBytes;

/// Longest message of the engine under test.
const MAX_MESSAGE: u64 = 1 << 16;

/// A packet as the fuzzer made it.
struct Made {
    source: Endpoint,
    protocol: ProtocolId,
    cookie: u64,
    info: Vec<u8>,
    body: Vec<u8>,
    short: bool,
}

impl Made {
    /// As a rank makes it that plays by the rules.
    fn honest(rank: u32, protocol: u16, body: &[u8]) -> Self {
        Self {
            source: Endpoint::new(Rank(rank), ContextId(0)),
            protocol: ProtocolId(protocol),
            cookie: 0,
            info: Vec::new(),
            body: body.to_vec(),
            short: true,
        }
    }
}

/// A port that delivers what it is given, and takes so many sends.
struct Scripted {
    arrived: Arc<Mutex<VecDeque<Made>>>,
    room: usize,
}

struct Out<'a>(&'a mut usize);

impl Inject for Out<'_> {
    fn inject(&mut self, run: &[Descriptor], _: &Sources<'_>) -> Injected {
        // Info lies behind its descriptor; one message is sent at a time.
        if run.first().is_some_and(|first| first.op == Op::Send) && *self.0 == 0 {
            return Injected { taken: 0, stop: Stop::Full, complete: true };
        }
        *self.0 = self.0.saturating_sub(1);
        Injected { taken: run.len(), stop: Stop::Done, complete: true }
    }

    fn loan(&mut self, _: usize) -> Option<Loan> {
        None
    }
}

impl Inject for Scripted {
    fn inject(&mut self, run: &[Descriptor], sources: &Sources<'_>) -> Injected {
        Out(&mut self.room).inject(run, sources)
    }

    fn loan(&mut self, _: usize) -> Option<Loan> {
        None
    }
}

impl Port for Scripted {
    fn advance(&mut self, budget: usize, sink: &mut dyn Sink) -> usize {
        let mut events = 0;
        while events < budget {
            let Some(made) = self.arrived.lock().expect("one thread").pop_front() else { break };
            let (source, protocol, cookie) = (made.source, made.protocol, made.cookie);
            let shared = Bytes::copy_from_slice(&made.body);
            let body = if made.short { Body::Short(&made.body) } else { Body::Owned(&shared) };
            let mut out = Out(&mut self.room);
            events += 1;
            // In the ways in which devices hand them over.
            let verdict = match <[u8; 8]>::try_from(&made.body[..]) {
                Ok(word) if made.short && made.info.is_empty() => {
                    let word = u64::from_ne_bytes(word);
                    sink.word(&mut out, &mut ArrivedWord::new(source, protocol, cookie, word))
                }
                _ if made.info.is_empty() => sink.plain(&mut out, source, protocol, cookie, body),
                _ => sink.packet(
                    &mut out,
                    &mut Packet { source, protocol, kind: 0, cookie, info: &made.info, body },
                ),
            };
            if verdict == Verdict::Hold {
                // Held for ever: nothing more is registered.
                break;
            }
        }
        events
    }

    fn arm(&mut self, _: bool) -> bool {
        true
    }

    fn disarm(&mut self) {}

    fn peer_down(&mut self, _: Rank) {}
}

/// A protocol of each flow that answers, consumes, or chooses its buffer.
struct Taker {
    name: &'static str,
    flow: Flow,
    chooses: bool,
}

impl Protocol for Taker {
    fn name(&self) -> &str {
        self.name
    }

    fn flow(&self) -> Flow {
        self.flow
    }

    fn chooses_buffer(&self) -> bool {
        self.chooses
    }

    fn accept(&self, _: &mut Scope<'_>, first: &FirstPacket<'_>) -> Accept {
        match first.total % 3 {
            0 => Accept::Whole,
            1 => Accept::Discard,
            _ => {
                let limit = (first.total / 2) as usize;
                let done =
                    Box::new(move |_: &mut Scope<'_>, buffer: BytesMut| assert!(buffer.len() <= limit));
                Accept::Fill { buffer: BytesMut::new(), limit, done }
            }
        }
    }

    fn on_message(&self, scope: &mut Scope<'_>, message: Incoming<'_>) {
        assert!(message.body.len() as u64 <= MAX_MESSAGE && message.info.len() <= MAX_INFO);
        if let Some(to) = message.reply() {
            scope.reply(to, Ok(Payload::Borrowed(message.info)));
        }
        if self.flow == Flow::Credited {
            scope.consumed(message.credit());
        }
    }
}

/// Pages that peers may put to and get from. The memory is never given back to the system, and so is the same in each run.
struct Pages(Mutex<Vec<Allocation>>);

impl Pages {
    fn arena() -> &'static Arena {
        static ARENA: OnceLock<Arena> = OnceLock::new();
        ARENA.get_or_init(|| Arena::new(1, 1 << 21))
    }

    fn taken(&self) -> MutexGuard<'_, Vec<Allocation>> {
        self.0.lock().expect("one thread")
    }
}

impl Memory for Pages {
    fn map(&self, rank: Rank, offset: u64, len: u64) -> Option<SharedSlice> {
        Self::arena().slice(rank, offset, len)
    }

    fn allocate(&self, len: u64) -> Result<Allocation, MemoryError> {
        let allocation = Self::arena().allocate(Rank(0), len)?;
        self.taken().push(Allocation { offset: allocation.offset, len: allocation.len });
        Ok(allocation)
    }

    fn free(&self, allocation: Allocation) {
        self.taken().retain(|taken| *taken != allocation);
        Self::arena().free(Rank(0), &allocation);
    }
}

impl Drop for Pages {
    /// What a peer that broke the rules may still write to is not given back by an engine.
    fn drop(&mut self) {
        for allocation in self.taken().drain(..) {
            Self::arena().free(Rank(0), &allocation);
        }
    }
}

fn memory() -> Arc<dyn Memory> {
    Arc::new(Pages(Mutex::default()))
}

/// An engine of rank 0, to which peers say things.
struct Scene {
    arrived: Arc<Mutex<VecDeque<Made>>>,
    told: Arc<Mutex<Vec<Fault>>>,
    engine: Engine,
    /// What the rank has exposed, where the first place is.
    _exposed: ExposedMemory<Vec<u8>>,
    #[cfg(test)]
    slots: Arc<SlotPool>,
}

impl Scene {
    /// Its port takes so many sends.
    fn new(
        ranks: u32,
        room: usize,
        protocols: impl IntoIterator<Item = Arc<dyn Protocol>>,
        config: EngineConfig,
    ) -> Self {
        let registry = Arc::new(Registry::default());
        for protocol in protocols {
            registry.register(protocol).expect("a new name");
        }
        let arrived: Arc<Mutex<VecDeque<Made>>> = Arc::default();
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        let exposed = Arc::new(Exposed::default());
        let memory_of_its_own = exposed.add(vec![7; 100]);
        let (engine, _slots) = Engine::new(
            Box::new(Scripted { arrived: arrived.clone(), room }),
            EngineParts {
                me: Endpoint::new(Rank(0), ContextId(0)),
                shape: JobShape { ranks, clients: 1, contexts: 1 },
                caps: Caps::send_only("scripted", 256).into(),
                config,
                registry,
                controls: Arc::default(),
                gates: Arc::new(Gates::new(ranks as usize, LightFence::Full)),
                memory: memory(),
                exposed: exposed.clone(),
                errors: Some(Arc::new(move |fault| faults.lock().expect("one thread").push(fault))),
                now: 0,
            },
        );
        Self {
            arrived,
            told,
            engine,
            _exposed: memory_of_its_own,
            #[cfg(test)]
            slots: _slots,
        }
    }

    /// What comes with the next advance.
    fn push(&self, made: Made) {
        self.arrived.lock().expect("one thread").push_back(made);
    }

    fn told(&self) -> Vec<Fault> {
        self.told.lock().expect("one thread").clone()
    }
}

#[cfg(test)]
impl Scene {
    fn with_info(&mut self, rank: u32, protocol: u16, cookie: u64, info: &[u8], body: &[u8]) {
        self.push(Made { cookie, info: info.to_vec(), ..Made::honest(rank, protocol, body) });
        self.engine.advance(16);
    }

    fn say(&mut self, rank: u32, protocol: u16, cookie: u64, body: &[u8]) {
        self.with_info(rank, protocol, cookie, &[], body);
    }
}

/// What declares a protocol.
fn declaration(index: u16, flow: u8, name: &[u8]) -> Vec<u8> {
    [&0u64.to_le_bytes()[..], &index.to_le_bytes(), &[flow, 0], name].concat()
}

/// Two peers send packets of any kind: no panic, and a peer that breaks the rules is cut off alone.
pub fn packets(data: &[u8]) {
    let mut input = Input(data);
    let protocols = [
        ("a", Flow::Inline, false),
        ("b", Flow::Credited, false),
        ("c", Flow::Replied, false),
        ("d", Flow::Inline, true),
        ("e", Flow::Credited, true),
    ];
    let protocols = protocols
        .map(|(name, flow, chooses)| -> Arc<dyn Protocol> { Arc::new(Taker { name, flow, chooses }) });
    let config = EngineConfig {
        credits: 4,
        credit_bytes: 1024,
        fifo_slots: 8,
        max_message: MAX_MESSAGE,
        get_window: 512,
        ..EngineConfig::default()
    };
    let mut scene = Scene::new(3, usize::from(input.byte()), protocols, config);
    // Rank 2 plays by the rules: it declares a protocol and sends in it.
    scene.push(Made::honest(2, wire::DECLARE, &declaration(0, 0, b"a")));
    let mut sent = 0;
    let mut number = 0;
    while !input.is_empty() && number < 200 {
        number += 1;
        // The messager's own and a few of users'.
        let protocol = u16::from(input.byte() % 24);
        let cookie = match input.byte() % 4 {
            0 | 2 => 0,
            1 => input.word(),
            // About where exposed memory is.
            _ => (1 << 62) + u64::from(input.byte()),
        };
        let shape = input.byte();
        let mut info = vec![shape; usize::from(shape) % (MAX_INFO + 1)];
        // Mostly right in form, so that what follows from it is reached.
        let body = match (input.byte() % 8, protocol) {
            (0..6, wire::DECLARE) => {
                declaration(u16::from(input.byte() % 8), input.byte() % 4, &[b'a' + input.byte() % 8])
            }
            (0..3, wire::GET) => {
                info.clear();
                u64::from(input.byte()).to_le_bytes().to_vec()
            }
            // Atomic operations, of which some are none.
            (0..6, wire::PUT | wire::GET) => {
                info = vec![input.byte() % 9, [4, 8, 8, 5][usize::from(input.byte() % 4)]];
                [input.word().to_le_bytes(), input.word().to_le_bytes()].concat()
            }
            (0..6, wire::CLEAR_TO_SEND) if shape % 2 == 0 => {
                let (place, len) = (input.word(), input.word());
                let protocol = wire::FIRST_USER + u16::from(input.byte() % 8);
                let (place, len, protocol, reserved) = (place.into(), len.into(), protocol.into(), [0; 6]);
                wire::ClearAhead { place, len, protocol, reserved }.as_bytes().to_vec()
            }
            (0..6, wire::CLEAR_TO_SEND) => input.word().to_le_bytes().to_vec(),
            (0..6, wire::SENT) => Vec::new(),
            (0..6, wire::STREAM_BEGIN | wire::REQUEST_TO_SEND) => {
                let (total, of) =
                    (u64::from(input.byte()) * 2, wire::FIRST_USER + u16::from(input.byte() % 8));
                let of = if of % 8 == 7 { wire::REPLY } else { of };
                let reserved = [0; 6];
                wire::StreamBegin {
                    total: total.into(),
                    cookie: cookie.into(),
                    protocol: of.into(),
                    reserved,
                }
                .as_bytes()
                .to_vec()
            }
            (0..4, _) => {
                let mut body = Vec::new();
                (0..2).for_each(|_| body.extend_from_slice(&input.word().to_le_bytes()));
                body
            }
            _ => {
                let len = usize::from(input.byte());
                input.take(len).to_vec()
            }
        };
        scene.push(Made { cookie, info, short: shape % 5 != 0, ..Made::honest(1, protocol, &body) });
        if number % 4 == 0 {
            scene.push(Made::honest(2, wire::FIRST_USER, b"honest"));
            sent += 1;
        }
        scene.engine.advance(16);
    }
    while scene.engine.advance(64) > 0 {}
    let stats = *scene.engine.stats();
    assert_eq!(stats.panics, 0, "a handler has found something wrong");
    let told = scene.told();
    assert!(!told.contains(&Fault::PeerCorrupt(Rank(2))), "{told:?}");
    assert!(stats.messages_received >= sent, "the honest rank's messages are missing");
    scene.engine.run(Work::Shutdown);
}

#[cfg(test)]
mod floods;

#[cfg(test)]
mod tests {
    use super::*;
    use posthaste_core::Ticket;
    use posthaste_core::device::RemoteMemory;
    use posthaste_core::engine::Rma;
    use posthaste_core::memory::AtomicOp;

    #[test]
    fn what_a_peer_sends_after_it_broke_the_rules_does_not_count() {
        let taker = Taker { name: "a", flow: Flow::Inline, chooses: false };
        let mut scene = Scene::new(2, 16, [Arc::new(taker) as _], EngineConfig::default());
        let mut send = |protocol: u16, body: &[u8]| {
            scene.say(1, protocol, 0, body);
            (scene.engine.stats().messages_received, scene.engine.scope().fault_of(Rank(1)))
        };
        send(wire::DECLARE, &declaration(0, 0, b"a"));
        assert_eq!(send(wire::FIRST_USER, &[1; 8]), (1, None));
        let corrupt = Some(Fault::PeerCorrupt(Rank(1)));
        assert_eq!(send(wire::GRANT, &[7; 3]), (1, corrupt), "a grant of three bytes");
        for len in [8, 9] {
            assert_eq!(send(wire::FIRST_USER, &vec![1; len]), (1, corrupt), "{len} bytes");
        }
    }

    /// With a put and a get at rank 2 under way.
    fn with_accesses(say: impl FnOnce(&mut Scene, [Ticket; 2])) -> Vec<Fault> {
        with_accesses_and_room(16, say)
    }

    /// The same, through a port that takes so many sends.
    fn with_accesses_and_room(room: usize, say: impl FnOnce(&mut Scene, [Ticket; 2])) -> Vec<Fault> {
        let mut scene = Scene::new(3, room, [], EngineConfig::default());
        let memory = RemoteMemory { rank: Rank(2), offset: 0, len: 64, mapped: None, incarnation: 0 };
        let mut scope = scene.engine.scope();
        let key = scope.table().remote.insert(memory);
        let target = Endpoint::new(Rank(2), ContextId(0));
        let accesses = [Rma::Put(Payload::Borrowed(&[1; 40])), Rma::Get(16)];
        let tickets =
            accesses.map(|rma| scope.rma(target, key, 0, rma).expect("in range").expect("nobody answered"));
        say(&mut scene, tickets);
        scene.told()
    }

    #[test]
    fn who_answers_somebody_that_has_departed_is_not_accused() {
        // The get still waits for room as this rank leaves, and the put is not acknowledged yet.
        let told = with_accesses_and_room(1, |say, tickets| {
            say.engine.scope().depart();
            let ends = tickets.map(|ticket| say.slots.take(ticket));
            assert!(ends.iter().all(|end| matches!(end, Some(Err(Fault::Shutdown)))), "{ends:?}");
            say.say(2, wire::PUT_DONE, 1, &[]);
            say.say(2, wire::GET_DATA, 0, &[7; 16]);
            assert_eq!(say.engine.scope().fault_of(Rank(2)), None);
        });
        assert_eq!(told, []);
    }

    #[test]
    fn an_acknowledgement_or_an_answer_ends_nothing_of_another_peer() {
        for (protocol, cookie, body) in [(wire::PUT_DONE, 1, &[][..]), (wire::GET_DATA, 0, &[7; 16])] {
            let told = with_accesses(|say, tickets| {
                say.say(1, protocol, cookie, body);
                assert!(
                    tickets.iter().all(|ticket| say.slots.take(*ticket).is_none()),
                    "rank 1 was asked for nothing"
                );
                say.say(2, wire::PUT_DONE, 1, &[]);
                say.say(2, wire::GET_DATA, 0, &[7; 16]);
                assert!(say.slots.take(tickets[0]).expect("done").is_ok());
                assert_eq!(say.slots.take(tickets[1]).expect("answered").expect("well").as_bytes(), [7; 16]);
            });
            assert_eq!(told, [Fault::PeerCorrupt(Rank(1))]);
        }
    }

    #[test]
    fn an_impossible_atomic_operation_cuts_its_sender_off_and_one_on_no_memory_is_told() {
        let body = [[1u8; 8], [0; 8]].concat();
        let add = AtomicOp::Add as u8;
        for fetch in [wire::PUT, wire::GET] {
            for (place, info, body, cut) in [
                (64, &[add, 8][..], &body[..], false),
                (68, &[add, 4], &body, false),
                (u64::MAX - 7, &[add, 8], &body, false),
                (68, &[add, 8], &body, true),
                (65, &[add, 4], &body, true),
                (64, &[8, 8], &body, true),
                (64, &[255, 8], &body, true),
                (64, &[add, 2], &body, true),
                (64, &[add, 16], &body, true),
                (64, &[add], &body, true),
                (64, &[add, 8, 0], &body, true),
                (64, &[add, 8], &body[..15], true),
                (64, &[add, 8], &[], true),
            ] {
                let told = with_accesses(|say, _| say.with_info(1, fetch, place, info, body));
                let corrupt = [Fault::PeerCorrupt(Rank(1))];
                assert_eq!(told, if cut { &corrupt[..] } else { &[] }, "{fetch} {place} {info:?} {body:?}");
            }
        }
    }

    #[test]
    fn who_asks_for_more_old_values_than_may_be_asked_for_is_cut_off() {
        let told = with_accesses(|say, _| {
            // The port takes 16 packets; what is answered behind them is kept, up to the window.
            for _ in 0..100_000 {
                say.with_info(1, wire::GET, 64, &[AtomicOp::Add as u8, 8], &[1; 16]);
            }
        });
        assert_eq!(told, [Fault::PeerCorrupt(Rank(1))]);
    }

    #[test]
    fn who_answers_more_than_was_asked_is_cut_off() {
        let code = &7u16.to_le_bytes()[..];
        for (protocol, cookie, body) in [
            (wire::PUT_DONE, 2, &[][..]),
            (wire::PUT_DONE, 0, &[]),
            (wire::PUT_DONE, 1, &[7]),
            (wire::GET_DATA, 0, &[7; 17]),
            (wire::GET_DATA, 0, &[]),
            (wire::GET, 0, &[0; 7]),
            (wire::GET, 0, &u64::MAX.to_le_bytes()),
            (wire::GET, 0, &(4u64 << 20).to_le_bytes()),
        ] {
            let told = with_accesses(|say, tickets| {
                say.say(2, protocol, cookie, body);
                for ticket in tickets {
                    let fault = say.slots.take(ticket).expect("it ended with its peer").expect_err("badly");
                    assert_eq!(fault, Fault::PeerCorrupt(Rank(2)));
                }
            });
            assert_eq!(told, [Fault::PeerCorrupt(Rank(2))], "{protocol} {cookie} {body:?}");
        }
        let told = with_accesses(|say, tickets| {
            say.say(2, wire::PUT_DONE, 1, code);
            let refused = say.slots.take(tickets[0]).expect("refused").expect_err("there is no such memory");
            assert_eq!(refused, Fault::NoSuchMemory(Rank(2)));
            // Absurd places are refused, too, and cut nobody off.
            say.say(1, wire::PUT, u64::MAX - 3, &[1; 8]);
            say.say(1, wire::GET, u64::MAX - 3, &8u64.to_le_bytes());
            assert!(say.slots.take(tickets[1]).is_none());
        });
        assert_eq!(told, []);
    }
}
