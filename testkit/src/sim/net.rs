//! The simulated network: what is in flight, and how it moves.

use super::{SimOptions, SimSysdep};
use crate::random::Random;
use bytes::Bytes;
use posthaste_core::descriptor::Info;
use posthaste_core::device::{Device, PeerEvent, PeerNews};
use posthaste_core::inprocess::Arena;
use posthaste_core::memory::{SharedSlice, WordOp};
use posthaste_core::slot::Outcome;
use posthaste_core::sysdep::{Personality, Sysdep};
use posthaste_core::{
    ClientId, ContextId, Endpoint, Fault, JobShape, MAX_INFO, ProtocolId, Rank, Ticket, Value,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A packet on its way, or arrived.
#[derive(Clone, Debug)]
pub(super) struct Transit {
    pub protocol: ProtocolId,
    pub kind: u8,
    pub cookie: u64,
    pub info: Info,
    pub bytes: Bytes,
}

/// What a rank's packet is before it goes on its way, for whoever makes a liar of that rank.
#[derive(Debug)]
pub struct Tampered<'p> {
    /// The protocol, as it was resolved at the source.
    pub protocol: ProtocolId,
    /// What travels with the packet beside its payload.
    pub cookie: &'p mut u64,
    /// Message info; cut off behind [`MAX_INFO`](posthaste_core::MAX_INFO) bytes.
    pub info: &'p mut Vec<u8>,
    /// The payload, in one packet.
    pub bytes: &'p mut Vec<u8>,
}

/// Changes the packets of a rank; false: it is lost.
pub type Tamper = Box<dyn FnMut(Tampered<'_>) -> bool + Send>;

/// For which of its sends a rank can have memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ration {
    /// For all.
    #[default]
    Enough,
    /// For none that is longer than [`SimOptions::max_inline`].
    NoPages,
    /// Nor for any to an endpoint to which nothing was sent before.
    NoLanes,
}

/// A send in flight.
#[derive(Debug)]
pub(super) struct Flying {
    pub packet: Transit,
    pub due: u64,
    /// Puts and gets of the pair that have to be done before it arrives.
    pub after: u64,
    pub ticket: u64,
}

/// A put or a get in flight.
#[derive(Debug)]
pub(super) enum Access {
    Put(Bytes, SharedSlice),
    /// Reads its source as late as it may: when it is done.
    PutFrom(SharedSlice, SharedSlice),
    GetInto(SharedSlice, SharedSlice),
    Get(SharedSlice),
    /// Whether its old value is wanted.
    Atomic(WordOp, bool, SharedSlice),
}

/// An end that travels back to the source.
#[derive(Debug)]
struct Ack {
    due: u64,
    ticket: u64,
    outcome: Outcome,
    /// Bytes that a get brings, and where to.
    landing: Option<(Vec<u8>, SharedSlice)>,
    /// It belongs to a put or get, which holds a slot until then.
    access: bool,
}

/// An ordered pair of endpoints of one client.
#[derive(Debug, Default)]
pub(super) struct Pair {
    pub sends: VecDeque<Flying>,
    pub arrived: VecDeque<Transit>,
    pub held: bool,
    pub accesses: VecDeque<(u64, u64, Access)>,
    acks: VecDeque<Ack>,
    pub injected: u64,
    done: u64,
    /// Something was sent.
    pub open: bool,
}

impl Pair {
    /// Puts and gets whose end was not reported yet.
    pub fn open_accesses(&self) -> usize {
        self.accesses.len() + self.acks.iter().filter(|ack| ack.access).count()
    }

    fn is_drained(&self) -> bool {
        self.sends.is_empty() && self.accesses.is_empty() && (self.arrived.is_empty() || self.held)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Alive,
    Left,
    Dead,
}

impl Life {
    pub fn fault(self, rank: Rank) -> Option<Fault> {
        match self {
            Life::Alive => None,
            Life::Left => Some(Fault::PeerClosed(rank)),
            Life::Dead => Some(Fault::PeerLost(rank)),
        }
    }
}

/// Names a pair: client, source endpoint, target endpoint, as indices.
pub(super) type PairKey = (usize, usize, usize);

/// One thing that can happen in the network.
#[derive(Clone, Copy, Debug)]
enum Move {
    Arrive(PairKey),
    Access(PairKey),
    Ack(PairKey),
    Tell {
        client: usize,
        to: Rank,
        of: Rank,
    },
    /// Of a rank that was started again.
    TellAgain {
        client: usize,
        to: Rank,
        of: Rank,
    },
}

pub(super) struct Net {
    pub random: Random,
    pub now: u64,
    pub trace: u64,
    pub pairs: BTreeMap<PairKey, Pair>,
    pub ended: BTreeMap<(usize, usize), VecDeque<(Ticket, Outcome)>>,
    /// By client and rank.
    pub lives: Vec<Vec<Life>>,
    pub watchers: BTreeMap<(usize, Rank), PeerNews>,
    told: Vec<(usize, Rank, Rank)>,
    /// How often each rank was started again.
    pub incarnations: Vec<u32>,
    /// The same as others were told, by client, who was told, and of whom.
    told_again: BTreeMap<(usize, Rank, Rank), u32>,
    tampers: BTreeMap<Rank, Tamper>,
    pub rations: BTreeMap<Rank, Ration>,
}

impl Net {
    /// What becomes of a packet of that rank; nothing if it is lost.
    pub fn tampered(&mut self, rank: Rank, packet: Transit) -> Option<Transit> {
        let Some(tamper) = self.tampers.get_mut(&rank) else { return Some(packet) };
        let Transit { protocol, kind, mut cookie, info, bytes } = packet;
        let (mut info, mut bytes) = (info.as_bytes().to_vec(), bytes.to_vec());
        let kept = tamper(Tampered { protocol, cookie: &mut cookie, info: &mut info, bytes: &mut bytes });
        info.truncate(MAX_INFO);
        let info = Info::new(&info).unwrap_or_default();
        kept.then(|| Transit { protocol, kind, cookie, info, bytes: bytes.into() })
    }

    pub fn note(&mut self, event: u64) {
        self.trace = (self.trace ^ event).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }

    pub fn due(&mut self, delay: u64) -> u64 {
        self.now + self.random.below(delay as usize + 1) as u64
    }
}

/// A simulated network; makes devices and kernels.
pub struct SimFabric {
    pub(super) shape: JobShape,
    pub(super) seed: u64,
    pub(super) options: SimOptions,
    pub(super) arenas: Vec<Arena>,
    net: Mutex<Net>,
}

impl std::fmt::Debug for SimFabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimFabric")
            .field("seed", &self.seed)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl SimFabric {
    /// A network whose every event follows from the seed.
    #[must_use]
    pub fn new(shape: JobShape, seed: u64, options: SimOptions) -> Arc<Self> {
        let options = options.checked();
        let net = Net {
            random: Random::new(seed),
            now: 1_000_000,
            trace: seed,
            pairs: BTreeMap::new(),
            ended: BTreeMap::new(),
            lives: vec![vec![Life::Alive; shape.ranks as usize]; usize::from(shape.clients)],
            watchers: BTreeMap::new(),
            told: Vec::new(),
            incarnations: vec![0; shape.ranks as usize],
            told_again: BTreeMap::new(),
            tampers: BTreeMap::new(),
            rations: BTreeMap::new(),
        };
        let arenas = (0..shape.clients).map(|_| Arena::new(shape.ranks, options.segment)).collect();
        Arc::new(Self { shape, seed, options, arenas, net: Mutex::new(net) })
    }

    /// The device of one client of one rank.
    #[must_use]
    pub fn device(self: &Arc<Self>, client: ClientId, rank: Rank) -> Arc<dyn Device> {
        Arc::new(super::SimDevice::new(self.clone(), client, rank))
    }

    /// The kernel as one rank sees it.
    #[must_use]
    pub fn sysdep(self: &Arc<Self>, rank: Rank) -> Arc<dyn Sysdep> {
        Arc::new(SimSysdep::new(self.clone(), Personality::one_node(rank, self.shape)))
    }

    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Duration {
        Duration::from_micros(self.net().now)
    }

    /// Lets virtual time pass.
    pub fn pass_time(&self, time: Duration) {
        self.net().now += time.as_micros() as u64;
    }

    /// A random number below `n`, from the seed.
    #[must_use]
    pub fn random_below(&self, n: usize) -> usize {
        self.net().random.below(n)
    }

    /// Fills the buffer with random bytes, from the seed.
    pub fn fill_random(&self, bytes: &mut [u8]) {
        self.net().random.fill(bytes);
    }

    /// A hash of everything that has happened: worlds with the same seed and program have the same.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.net().trace
    }

    pub(super) fn net(&self) -> MutexGuard<'_, Net> {
        self.net.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn rank_of(&self, index: usize) -> Rank {
        self.shape.endpoint(index).rank
    }

    /// Makes a liar of a rank: its packets go through that from now on.
    pub fn tamper(&self, rank: Rank, tamper: Tamper) {
        self.net().tampers.insert(rank, tamper);
    }

    /// How much memory the rank has for what it sends from now on.
    pub fn ration(&self, rank: Rank, ration: Ration) {
        self.net().rations.insert(rank, ration);
    }

    /// Crashes the rank. Of what it had in flight a random part of each pair is lost, the last first; what has arrived
    /// is delivered. Then the others are told, each at its own time.
    pub fn kill(&self, rank: Rank) {
        let mut net = self.net();
        let net = &mut *net;
        net.note(0xdead << 32 | u64::from(rank.0));
        for client in 0..usize::from(self.shape.clients) {
            if net.lives[client][rank.index()] == Life::Alive {
                net.lives[client][rank.index()] = Life::Dead;
            }
        }
        for (&(_, from, to), pair) in &mut net.pairs {
            if self.rank_of(to) == rank {
                *pair = Pair { done: pair.done, injected: pair.injected, ..Pair::default() };
            } else if self.rank_of(from) == rank {
                pair.acks.clear();
                pair.accesses.truncate(net.random.below(pair.accesses.len() + 1));
                let will_be_done = pair.done + pair.accesses.len() as u64;
                let arriving = pair.sends.iter().take_while(|send| send.after <= will_be_done).count();
                pair.sends.truncate(net.random.below(arriving + 1));
            }
        }
    }

    /// Starts a rank again that was killed: devices made from now on are those of its next incarnation. What was on its way
    /// to or from the old one is lost. The others are told, each at its own time.
    pub fn restart(&self, rank: Rank) {
        let mut net = self.net();
        let net = &mut *net;
        net.note(0xbea1 << 32 | u64::from(rank.0));
        net.incarnations[rank.index()] += 1;
        for lives in &mut net.lives {
            lives[rank.index()] = Life::Alive;
        }
        net.pairs.retain(|&(_, from, to), _| self.rank_of(from) != rank && self.rank_of(to) != rank);
        net.ended.retain(|&(_, index), _| self.rank_of(index) != rank);
        net.told.retain(|&(_, to, of)| to != rank && of != rank);
        net.told_again.retain(|&(_, to, _), _| to != rank);
        net.watchers.retain(|&(_, watcher), _| watcher != rank);
    }

    pub(super) fn depart(&self, client: usize, rank: Rank, incarnation: u32) {
        let mut net = self.net();
        if net.incarnations[rank.index()] == incarnation && net.lives[client][rank.index()] == Life::Alive {
            net.lives[client][rank.index()] = Life::Left;
        }
    }

    /// Moves one item that is due, chosen by the seed; if none is due, lets time pass until one is. Returns false if
    /// nothing is in flight at all.
    pub fn move_one(&self) -> bool {
        let mut net = self.net();
        let mut moves = self.moves(&net);
        if moves.is_empty() {
            return false;
        }
        if !moves.iter().any(|&(due, _)| due <= net.now) {
            net.now = moves.iter().map(|&(due, _)| due).min().unwrap_or(net.now);
        }
        let now = net.now;
        moves.retain(|&(due, _)| due <= now);
        let chosen = if self.options.reorder {
            net.random.below(moves.len())
        } else {
            moves.iter().enumerate().min_by_key(|(_, (due, _))| *due).map_or(0, |(at, _)| at)
        };
        let (_, chosen) = moves[chosen];
        self.carry_out(net, chosen);
        true
    }

    /// Everything that can move next, each with the time at which it can.
    fn moves(&self, net: &Net) -> Vec<(u64, Move)> {
        let mut moves = Vec::new();
        for (&key, pair) in &net.pairs {
            if let Some((due, ..)) = pair.accesses.front() {
                moves.push((*due, Move::Access(key)));
            }
            if let Some(send) = pair.sends.front()
                && send.after <= pair.done
            {
                moves.push((send.due, Move::Arrive(key)));
            }
            if let Some(ack) = pair.acks.front() {
                moves.push((ack.due, Move::Ack(key)));
            }
        }
        for client in 0..usize::from(self.shape.clients) {
            for of in
                (0..self.shape.ranks).map(Rank).filter(|of| net.lives[client][of.index()] != Life::Alive)
            {
                for to in (0..self.shape.ranks).map(Rank).filter(|to| *to != of) {
                    let drained = net
                        .pairs
                        .iter()
                        .filter(|((c, from, at), _)| {
                            *c == client && self.rank_of(*from) == of && self.rank_of(*at) == to
                        })
                        .all(|(_, pair)| pair.is_drained());
                    if drained
                        && net.watchers.contains_key(&(client, to))
                        && net.lives[client][to.index()] != Life::Dead
                        && !net.told.contains(&(client, to, of))
                    {
                        moves.push((net.now, Move::Tell { client, to, of }));
                    }
                }
            }
        }
        for &(client, to) in net.watchers.keys() {
            for of in (0..self.shape.ranks).map(Rank).filter(|of| *of != to) {
                let known = net.told_again.get(&(client, to, of)).copied().unwrap_or(0);
                if known < net.incarnations[of.index()] && net.lives[client][to.index()] != Life::Dead {
                    moves.push((net.now, Move::TellAgain { client, to, of }));
                }
            }
        }
        moves
    }

    fn carry_out(&self, mut guard: MutexGuard<'_, Net>, chosen: Move) {
        let net = &mut *guard;
        let due = net.due(self.options.delay);
        match chosen {
            Move::Arrive(key) => {
                net.note(1 << 56 | (key.1 as u64) << 16 | key.2 as u64);
                let Some(pair) = net.pairs.get_mut(&key) else { return };
                let Some(send) = pair.sends.pop_front() else { return };
                pair.arrived.push_back(send.packet);
                if send.ticket != 0 {
                    let outcome = Ok(Value::Unit);
                    pair.acks.push_back(Ack {
                        due,
                        ticket: send.ticket,
                        outcome,
                        landing: None,
                        access: false,
                    });
                }
            }
            Move::Access(key) => {
                net.note(2 << 56 | (key.1 as u64) << 16 | key.2 as u64);
                let Some(pair) = net.pairs.get_mut(&key) else { return };
                let Some((_, ticket, access)) = pair.accesses.pop_front() else { return };
                pair.done += 1;
                let mut ack = Ack { due, ticket, outcome: Ok(Value::Unit), landing: None, access: true };
                match access {
                    Access::Put(bytes, target) => target.write(&bytes),
                    Access::PutFrom(source, target) => target.copy_from(source),
                    Access::GetInto(local, remote) => ack.landing = Some((remote.to_vec(), local)),
                    Access::Get(remote) => ack.outcome = Ok(Value::copy(&remote.to_vec())),
                    Access::Atomic(op, fetch, word) => {
                        let old = word.apply(&op).expect("the engine has checked that it is a word");
                        if fetch {
                            ack.outcome = Ok(op.len.value(old));
                        }
                    }
                }
                pair.acks.push_back(ack);
            }
            Move::Ack(key) => {
                net.note(3 << 56 | (key.1 as u64) << 16 | key.2 as u64);
                let Some(ack) = net.pairs.get_mut(&key).and_then(|pair| pair.acks.pop_front()) else {
                    return;
                };
                if let Some((bytes, local)) = ack.landing {
                    local.write(&bytes);
                }
                if let Some(ticket) = Ticket::from_word(ack.ticket) {
                    net.ended.entry((key.0, key.1)).or_default().push_back((ticket, ack.outcome));
                }
            }
            Move::Tell { client, to, of } => {
                net.note(4 << 56 | u64::from(to.0) << 16 | u64::from(of.0));
                net.told.push((client, to, of));
                let fault = net.lives[client][of.index()].fault(of);
                let incarnation = net.incarnations[of.index()];
                let watcher = net.watchers.get(&(client, to)).cloned();
                drop(guard);
                if let (Some(watcher), Some(fault)) = (watcher, fault) {
                    watcher(of, PeerEvent::Down { fault, incarnation, cause: None });
                }
            }
            Move::TellAgain { client, to, of } => {
                net.note(6 << 56 | u64::from(to.0) << 16 | u64::from(of.0));
                let incarnation = net.incarnations[of.index()];
                net.told_again.insert((client, to, of), incarnation);
                let watcher = net.watchers.get(&(client, to)).cloned();
                drop(guard);
                if let Some(watcher) = watcher {
                    watcher(of, PeerEvent::Up { incarnation });
                }
            }
        }
    }

    /// What is in flight, for the report of a test that does not finish.
    #[must_use]
    pub fn describe(&self) -> String {
        use std::fmt::Write;
        let net = self.net();
        let mut text = format!("seed {}, {:?}, virtual time {} µs\n", self.seed, self.options, net.now);
        for ((client, from, to), pair) in &net.pairs {
            let (from, to): (Endpoint, Endpoint) = (self.shape.endpoint(*from), self.shape.endpoint(*to));
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "  client {client}: {from} -> {to}: {} sends flying, {} arrived{}, {} accesses, {} acks",
                pair.sends.len(),
                pair.arrived.len(),
                if pair.held { " (held)" } else { "" },
                pair.accesses.len(),
                pair.acks.len()
            );
        }
        let _ = writeln!(text, "  lives: {:?}", net.lives);
        text
    }

    pub(super) fn index(&self, rank: Rank, context: ContextId) -> usize {
        self.shape.index(Endpoint::new(rank, context))
    }
}
