//! What the protocols make of a member that says anything: collectives, groups, windows, exchanges and many-to-many.
//!
//! A liar plays by the rules as far as the engine beneath can tell, which [`packets`](super::packets) is for; what it says
//! in the protocols above is changed on its way.

use super::Input;
use crate::sim::{SimOptions, SimWorld, Tampered};
use futures::future::{FusedFuture, FutureExt, MaybeDone, maybe_done};
use posthaste_core::context::Face;
use posthaste_core::engine::EngineConfig;
use posthaste_core::{Client, ConnectionId, Fault, JobShape, Messager, Rank, wire};
use posthaste_protocols::{Collectives, Exchange, Group, LayoutAccess, ManyToMany, Part, Reduce};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};

const SHAPE: JobShape = JobShape { ranks: 3, clients: 1, contexts: 1 };
/// In the middle, so that trees and rings go through it.
const LIAR: Rank = Rank(1);
/// Steps for as long as the liar lives, and until the others have ended behind it.
const STEPS: u64 = 20_000;
const MOST_STEPS: u64 = 400_000;

/// The protocols of one rank.
#[derive(Clone)]
struct Protocols {
    client: Arc<Client>,
    exchange: Exchange,
    collectives: Collectives,
    many: ManyToMany,
}

impl Protocols {
    fn new(client: &Arc<Client>) -> Self {
        let exchange = Exchange::new(&**client).expect("a new name");
        let layouts = LayoutAccess::new(client).expect("a new name");
        let many = ManyToMany::new(&**client).expect("a new name");
        let collectives = Collectives::new(&**client, &[0; SHAPE.ranks as usize]).expect("a new name");
        let collectives = collectives.with_windows(client, &exchange, &layouts).expect("it has a context");
        Self { client: client.clone(), exchange, collectives, many }
    }

    fn me(&self) -> Rank {
        self.client.contexts()[0].me().rank
    }

    /// What a rank does. Where something fails, it ends there.
    async fn work(&self, which: u8) -> Result<(), Box<dyn std::error::Error>> {
        let me = self.me();
        let world = self.collectives.world();
        let sum = Reduce::sum();
        // Which of these begins differs, so that each is reached before a lie has ended the others.
        for at in 0..6 {
            match (at + which) % 6 {
                0 => {
                    // In flight together, and more than go by messages alone.
                    let barriers: Vec<_> = (0..6).map(|_| world.barrier()).collect();
                    let total = world.all_reduce(&[u64::from(me.0); 3], &sum);
                    futures::future::try_join_all(barriers).await?;
                    total.await?;
                }
                1 => {
                    let long = vec![me.0; 3000];
                    world.broadcast(1, &long).await?;
                    world.all_reduce(&long, &Reduce::max()).await?;
                    world.all_gather(&long[..700]).await?;
                }
                2 => {
                    world.scatter(1, &[7u16; 30][..if me == LIAR { 30 } else { 0 }], 10).await?;
                    world.all_to_all(&[me.0; 6]).await?;
                    world
                        .all_to_all_v(&vec![1u8; 3 * (1 + me.index())], &[1 + me.index(); 3], &[1, 2, 3])
                        .await?;
                }
                3 => {
                    if let Some(group) = world.split(Some(me.0 % 2), 0).await? {
                        group.barrier().await?;
                    }
                    let both = world.subset(&[0, 1, 2]).await?;
                    self.window(&both).await?;
                }
                4 => {
                    self.window(&world).await?;
                    self.exchange.barrier().await?;
                }
                _ => {
                    let connection = ConnectionId(3);
                    let part = |rank: u32| Part { source: Rank(rank), offset: 8 * rank as usize, len: 8 };
                    let parts: Vec<Part> = (0..SHAPE.ranks).map(part).collect();
                    let received = self.many.receive(connection, 24, &parts)?;
                    let to_all = (0..SHAPE.ranks).map(|rank| (Rank(rank), vec![rank as u8; 8].into()));
                    self.many.send(connection, to_all).await?;
                    received.await?;
                }
            }
        }
        Ok(())
    }

    async fn window(&self, group: &Group) -> Result<(), Box<dyn std::error::Error>> {
        let window = group.shmalloc::<u64>(16).await?;
        let right = group.to_job((group.rank() + 1) % group.size()).ok_or("a member")?;
        window.put(right, 1, 7).await?;
        window.get(right, 1).await?;
        window.fetch_add(right, 2, 1).await?;
        group.barrier().await?;
        window.free().await?;
        Ok(())
    }

    /// Works, and leaves in order; how the work ended.
    async fn live(self, which: u8) -> Result<(), String> {
        let ended = self.work(which).await.map_err(|error| error.to_string());
        let context = &self.client.contexts()[0];
        // What is queued is delivered first, as whoever leaves a job does.
        while context.enter(|engine| engine.scope().has_queued()).unwrap_or(true) {
            futures::pending!();
        }
        self.client.close().await;
        ended
    }
}

/// Changes what a rank says in the protocols above the engine as the input wants it, and nothing more once that is used up.
fn lie(script: &mut Vec<u8>, said: Tampered<'_>) -> bool {
    // Past what the devices of all ranks exchange beneath.
    if said.protocol.0 < wire::FIRST_USER || script.is_empty() {
        return true;
    }
    let whole = std::mem::take(script);
    let mut input = Input(&whole);
    let (kind, at) = (input.byte(), usize::from(input.byte()));
    let place = |len: usize| if len == 0 { 0 } else { at % len };
    let mut kept = true;
    match kind % 16 {
        0 if !said.bytes.is_empty() => {
            let len = said.bytes.len();
            said.bytes[place(len)] ^= input.byte() | 1;
        }
        1 => said.bytes.truncate(place(said.bytes.len() + 1)),
        2 if said.bytes.len() < 32 => said.bytes.extend_from_slice(input.take(at % 40)),
        3 if !said.info.is_empty() => {
            let len = said.info.len();
            said.info[place(len)] ^= input.byte() | 1;
        }
        4 => said.info.truncate(place(said.info.len() + 1)),
        5 => said.info.extend_from_slice(input.take(at % 40)),
        6 if said.bytes.len() >= 8 => {
            let from = place(said.bytes.len() - 7);
            said.bytes[from..from + 8].copy_from_slice(&input.word().to_le_bytes());
        }
        7 => *said.bytes = input.take(at % 80).to_vec(),
        8 => kept = false,
        // Most is said as it is.
        _ => {}
    }
    *script = input.0.to_vec();
    kept
}

/// Three ranks work together, and one of them says anything: no panic, no honest rank is taken for a liar by another, and
/// when the liar is gone, all ends.
pub fn records(data: &[u8]) {
    // What a lie has broken ends with an error, which is as it should be.
    let _ends = ends(data);
}

/// How the work of each rank ended; nothing of the liar if it was ended in the middle.
fn ends(data: &[u8]) -> Vec<Option<Result<(), String>>> {
    let mut input = Input(data);
    let (seed, which, shape) = (u64::from(input.byte()), input.byte() % 6, input.byte());
    let options =
        SimOptions { native: shape % 2 == 0, delay: 5, stall: 0, segment: 32 << 10, ..SimOptions::default() };
    let options = if shape % 8 == 7 { SimOptions { lane_slots: 1, ..options } } else { options };
    let mut world = SimWorld::new(SHAPE, seed, options, EngineConfig::default());
    let protocols: Vec<Protocols> = world.clients().iter().map(Protocols::new).collect();
    let told: Arc<Mutex<Vec<(Rank, Fault)>>> = Arc::default();
    for honest in protocols.iter().filter(|rank| rank.me() != LIAR) {
        let (told, me) = (told.clone(), honest.me());
        honest.client.on_error(move |fault| told.lock().expect("one thread").push((me, fault)));
    }
    let mut script = input.0.to_vec();
    world.fabric().tamper(LIAR, Box::new(move |said| lie(&mut script, said)));
    let live = |rank: Protocols| maybe_done(Box::pin(rank.live(which)));
    let mut lives: Vec<_> = protocols.into_iter().map(live).collect();
    let end = world.steps() + STEPS;
    let mut liar_lives = true;
    let all_over = |world: &mut SimWorld| {
        let mut cx = Context::from_waker(Waker::noop());
        // Of all, whoever is ready first.
        let waits = |life: &mut MaybeDone<_>| !life.is_terminated() && life.poll_unpin(&mut cx).is_pending();
        if lives.iter_mut().map(waits).filter(|waits| *waits).count() == 0 {
            return true;
        }
        if liar_lives && world.steps() >= end {
            liar_lives = false;
            world.kill(LIAR);
            lives[LIAR.index()] = MaybeDone::Gone;
        }
        false
    };
    world.run_until(all_over, MOST_STEPS);
    for client in world.clients() {
        let panics = client.contexts()[0].enter(|engine| engine.stats().panics);
        assert_eq!(panics.unwrap_or(0), 0, "{}", client.contexts()[0].me());
    }
    let told = told.lock().expect("one thread");
    let wrong = |(_, fault): &&(Rank, Fault)| matches!(fault, Fault::PeerCorrupt(rank) if *rank != LIAR);
    assert!(told.iter().find(wrong).is_none(), "{told:?}");
    let ends = lives.iter_mut().map(|life| Pin::new(life).take_output()).collect();
    drop(lives);
    // Of the liar, too, if it was ended in the middle: nothing is left of any of them.
    for client in world.clients().to_vec() {
        world.run(client.close(), MOST_STEPS);
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_nobody_lies_all_ends_well() {
        for which in 0..6 {
            for shape in [0, 1, 7] {
                assert_eq!(ends(&[which, which, shape]), [Some(Ok(())), Some(Ok(())), Some(Ok(()))]);
            }
        }
    }

    #[test]
    fn a_rank_that_says_nothing_is_waited_for_until_it_is_gone() {
        let nothing = [8; 5000];
        let ends = ends(&nothing);
        assert_eq!(ends[LIAR.index()], None);
        assert!([0, 2].iter().all(|rank| matches!(&ends[*rank], Some(Err(_)))), "{ends:?}");
    }
}
