//! Mistakes of callers that the others cannot see: each is told to whoever made it, and to the others with its name.

#[allow(dead_code, reason = "these tests need a part of it")]
mod near;
#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use futures::future::join_all;
use near::{fault_of, soon, wait, warm};
use posthaste_core::context::Face;
use posthaste_core::{Collective, Fault, Messager, Rank};
use posthaste_protocols::collective::{
    Action, Algorithm, Blocks, Execution, Executor, Kind, PhaseByPhase, Place, Program, Route, Schedule,
    Step, Turn,
};
use posthaste_protocols::{CollectiveError, Collectives, Group, InFlight, Reduce};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use support::{Member, Setup, run};

type Call = fn(&Group) -> InFlight<Vec<u64>>;

/// Of each way in which operations are done. In all of them every member waits for every other.
const CALLS: [Call; 4] = [
    |group| group.all_reduce(&[1], &Reduce::sum()),
    |group| group.all_to_all(&vec![1; 24 * group.size()]),
    |group| group.all_reduce(&vec![1; 60_000], &Reduce::sum()),
    |group| group.schedule(Algorithm::Dissemination).all_gather(&[1; 9]),
];

#[test]
fn a_group_that_one_drops_early_ends_for_the_others_with_its_name() {
    for (number, call) in CALLS.into_iter().enumerate() {
        for size in [2, 3, 5, 9] {
            for (victim, late, is_warm) in [(0, 0, true), (1, 60, true), (1, 0, false), (0, 60, false)] {
                run(size, Setup::new(), async |member| {
                    let world = member.collectives.world();
                    let group = world.split(Some(0), member.rank.0).await.unwrap().unwrap();
                    if is_warm {
                        warm(&group).await;
                    }
                    if member.rank.0 == victim {
                        wait(late).await;
                        drop(group);
                    } else {
                        let left = Fault::GroupLeft(Rank(victim));
                        assert_eq!(fault_of(call(&group).await), left, "operation {number}, {size} ranks");
                        assert_eq!(fault_of(group.barrier().await), left);
                    }
                    world.barrier().await.unwrap();
                });
            }
        }
    }
}

#[test]
fn what_a_member_called_before_it_dropped_the_group_ends_well() {
    for call in CALLS {
        run(5, Setup::new(), async |member| {
            let world = member.collectives.world();
            let group = world.split(Some(0), 0).await.unwrap().unwrap();
            if member.rank.0 == 3 {
                let several: Vec<_> = (0..5).map(|_| call(&group)).collect();
                drop(group);
                join_all(several).await.into_iter().for_each(|one| drop(one.unwrap()));
            } else {
                wait(30 * member.rank.index()).await;
                for _ in 0..5 {
                    call(&group).await.unwrap();
                }
                assert_eq!(fault_of(call(&group).await), Fault::GroupLeft(Rank(3)));
            }
            world.barrier().await.unwrap();
        });
    }
}

#[test]
fn a_group_on_the_fly_may_be_dropped_by_whoever_made_it() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        if member.rank.0 == 0 {
            let group = member.collectives.on_the_fly(&[Rank(0), Rank(1), Rank(2)]).unwrap();
            drop(group.broadcast(0, &[5u64]));
        } else {
            wait(20 * member.rank.index()).await;
            let group = member.collectives.arrival().await.unwrap();
            assert_eq!(group.broadcast(0, &[0u64]).await.unwrap(), [5]);
            assert_eq!(fault_of(group.barrier().await), Fault::GroupLeft(Rank(0)));
        }
        world.barrier().await.unwrap();
    });
}

struct Unwoken;

impl Wake for Unwoken {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn nothing_is_kept_of_who_gives_up_waiting_for_a_group() {
    run(2, Setup::new(), async |member| {
        let wakers: Vec<Arc<Unwoken>> = (0..100).map(|_| Arc::new(Unwoken)).collect();
        for waker in &wakers {
            let mut arrival = Box::pin(member.collectives.arrival());
            let waker = Waker::from(waker.clone());
            assert!(arrival.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        // What other parts keep of a wait, as until a timer that was set for it, is theirs: no more than one waker each.
        let kept = wakers.iter().filter(|waker| Arc::strong_count(waker) > 1).count();
        assert!(kept <= 3, "of {kept} of 100");
        member.collectives.world().barrier().await.unwrap();
    });
}

#[test]
fn values_of_a_wrong_length_are_told_to_the_others_as_who_gave_them() {
    type Wrong = fn(&Group) -> InFlight<Vec<u64>>;
    let wrong: [(Wrong, Wrong, Collective); 3] = [
        (|group| group.all_to_all(&[0; 7]), |group| group.all_to_all(&[0; 8]), Collective::AllToAll(14)),
        (
            |group| group.reduce_scatter(&[0; 9], &Reduce::sum()),
            |group| group.reduce_scatter(&[0; 8], &Reduce::sum()),
            Collective::ReduceScatter(18),
        ),
        (|group| group.scatter(2, &[0; 9], 2), |group| group.scatter(2, &[0; 8], 2), Collective::Scatter(16)),
    ];
    for (wrong, right, call) in wrong {
        for (late, is_warm) in [(0, true), (60, true), (0, false), (60, false)] {
            run(4, Setup::new(), async |member| {
                let world = member.collectives.world();
                let group = world.split(Some(0), 0).await.unwrap().unwrap();
                if is_warm {
                    warm(&group).await;
                }
                if member.rank.0 == 2 {
                    wait(late).await;
                    // Before anything is awaited.
                    let refused = wrong(&group);
                    assert!(format!("{refused:?}").contains("Refused(Length"), "{refused:?}");
                    assert!(matches!(refused.await, Err(CollectiveError::Length { .. })));
                } else {
                    let told = Fault::CollectiveRefused { rank: Rank(2), call };
                    // Who is sent its block by nobody else waits for it.
                    assert_eq!(fault_of(right(&group).await), told);
                }
                let told = Fault::CollectiveRefused { rank: Rank(2), call };
                wait(100).await;
                assert_eq!(fault_of(group.barrier().await), told);
                world.barrier().await.unwrap();
            });
        }
    }
}

/// Operations of a group that may be under way on a rank.
const MOST: usize = 32_768;

#[test]
fn as_many_operations_as_can_be_told_apart_may_be_under_way() {
    let all_are_called = AtomicBool::new(false);
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        let forced = world.schedule(Algorithm::Binomial);
        let sum = |value: u64| forced.all_reduce(&[value], &Reduce::sum());
        if member.rank.0 == 0 {
            let all: Vec<_> = (0..MOST as u64).map(sum).collect();
            let too_many = CollectiveError::TooManyUnderWay { most: MOST };
            assert_eq!(sum(0).await.unwrap_err(), too_many);
            assert_eq!(world.barrier().await.unwrap_err(), too_many);
            assert_eq!(world.all_to_all(&[0u64; 10]).await.unwrap_err(), too_many);
            all_are_called.store(true, Ordering::Relaxed);
            for (number, one) in all.into_iter().enumerate() {
                assert_eq!(one.await.unwrap(), [2 * number as u64]);
            }
        } else {
            while !all_are_called.load(Ordering::Relaxed) {
                wait(1).await;
            }
            for number in 0..MOST as u64 {
                assert_eq!(sum(number).await.unwrap(), [2 * number]);
            }
        }
        // Nothing was told to the other, and there is room again.
        assert_eq!(sum(3).await.unwrap(), [6]);
    });
}

fn bytes(len: usize) -> Vec<u8> {
    vec![1; len]
}

/// What rank 0 calls, and what all others call.
type Different = [fn(&Group) -> InFlight<Vec<u8>>; 2];

/// One gives so many bytes to rank 1 and awaits none, or awaits so many from rank 0.
fn exchange(group: &Group, gives: usize, awaits: usize) -> InFlight<Vec<u8>> {
    match group.rank() {
        0 => group.all_to_all_v(&bytes(gives), &[0, gives], &[0, 0]),
        _ => group.all_to_all_v(&[0u8; 0], &[0, 0], &[awaits, 0]),
    }
}

#[test]
fn calls_that_differ_are_told_apart_where_no_message_tells_of_them() {
    let different: [Different; 7] = [
        // The sender waits for a receiver that waits for a short message.
        [|group| group.broadcast(0, &bytes(20_000)), |group| group.broadcast(0, &bytes(8_000))],
        [|group| group.scatter(0, &bytes(40_000), 20_000), |group| group.scatter(0, &[], 8_000)],
        // Everybody sends, or nobody does.
        [|group| group.broadcast(0, &bytes(20_000)), |group| group.broadcast(1, &bytes(20_000))],
        [|group| group.broadcast(1, &bytes(1)), |group| group.broadcast(0, &bytes(1))],
        // What all agree upon is nothing but that blocks differ in length.
        [|group| exchange(group, 20 << 10, 8 << 10), |group| exchange(group, 20 << 10, 8 << 10)],
        [|group| exchange(group, 128 << 10, 256 << 10), |group| exchange(group, 128 << 10, 256 << 10)],
        [|group| exchange(group, 256 << 10, 128 << 10), |group| exchange(group, 256 << 10, 128 << 10)],
    ];
    for (number, [ours, theirs]) in different.into_iter().enumerate() {
        for late in [0, 60] {
            run(2, Setup::new(), async |member| {
                let world = member.collectives.world();
                let group = world.split(Some(0), 0).await.unwrap().unwrap();
                wait(late * (member.rank.index() ^ (number % 2))).await;
                let call = if member.rank.0 == 0 { ours } else { theirs };
                let fault = fault_of(soon(&format!("pair {number}"), call(&group)).await);
                assert!(matches!(fault, Fault::CollectiveMismatch { .. }), "pair {number}: {fault}");
                world.barrier().await.unwrap();
            });
        }
    }
}

#[test]
fn who_waits_for_a_busy_member_is_answered_in_the_end() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        for (number, len) in [1, 20_000].into_iter().enumerate() {
            if member.rank.index() == number {
                tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            }
            assert_eq!(world.broadcast(0, &bytes(len)).await.unwrap(), bytes(len));
            let gathered = world.gather(2, &bytes(len)).await.unwrap();
            assert_eq!(gathered, (member.rank.0 == 2).then(|| bytes(3 * len)));
        }
    });
}

#[test]
fn a_group_that_one_member_refuses_to_use_again_and_again_goes() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        let group = world.split(Some(0), 0).await.unwrap().unwrap();
        warm(&group).await;
        if member.rank.0 == 1 {
            for _ in 0..2 {
                assert!(group.all_to_all(&[0u64; 7]).await.is_err());
            }
            let slots = || format!("{:?}", member.collectives).matches("group, next operation").count();
            assert_eq!(slots(), 2);
            drop(group);
            wait(100).await;
            assert_eq!(slots(), 1, "the world alone is left");
        } else {
            assert!(soon("a barrier", group.barrier()).await.is_err());
        }
        world.barrier().await.unwrap();
    });
}

/// A schedule that is none on one rank.
#[derive(Debug)]
struct Odd {
    program: Option<Program>,
}

impl Schedule for Odd {
    fn name(&self) -> &str {
        "odd"
    }

    fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program> {
        match place.rank {
            1 => self.program.clone(),
            _ => Algorithm::Binomial.program(kind, place),
        }
    }
}

#[test]
fn a_mistake_that_is_told_at_once_is_no_call() {
    type Wrong = fn(&Group) -> InFlight<Vec<u64>>;
    let wrong: [Wrong; 3] = [
        |group| group.broadcast(3, &[0]),
        |group| group.custom_schedule(Arc::new(Odd { program: None })).broadcast(0, &[0]),
        |group| {
            let mut route = Route::default();
            route.receive(0, 7, Blocks::one(0), Action::Store);
            let odd = Odd { program: Some(Program::new(1, route)) };
            group.custom_schedule(Arc::new(odd)).broadcast(0, &[0])
        },
    ];
    for (number, wrong) in wrong.into_iter().enumerate() {
        run(3, Setup::new(), async |member| {
            let world = member.collectives.world();
            if member.rank.0 == 1 {
                // The others wait by then, and ask.
                wait(300).await;
                let refused = soon("a refusal", wrong(&world)).await;
                assert!(!matches!(refused, Ok(_) | Err(CollectiveError::Fault(_))), "{number}: {refused:?}");
            }
            let given = [number as u64 + u64::from(member.rank.0 == 1)];
            let got = soon("a broadcast", world.broadcast(1, &given)).await.unwrap();
            assert_eq!(got, [number as u64 + 1]);
        });
    }
}

/// Offers nothing.
#[derive(Debug)]
struct Nothing;

impl Schedule for Nothing {
    fn name(&self) -> &str {
        "nothing"
    }

    fn program(&self, _: Kind, _: &Place<'_>) -> Option<Program> {
        None
    }
}

#[test]
fn an_operation_that_nobody_is_offered_breaks_nothing() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        assert!(world.schedule(Algorithm::Ring).barrier().await.is_err());
        assert!(world.custom_schedule(Arc::new(Nothing)).barrier().await.is_err());
        wait(50).await;
        world.barrier().await.unwrap();
    });
}

/// As many groups as rank 1 may have, if this is that one.
fn all_numbers_of_rank_1(member: &Member) -> Vec<Group> {
    let another = || member.collectives.on_the_fly(&[Rank(1)]).ok();
    if member.rank == Rank(1) { std::iter::from_fn(another).collect() } else { Vec::new() }
}

#[test]
fn a_group_for_which_one_member_has_no_number_is_broken_for_all() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        let own = all_numbers_of_rank_1(&member);
        let split = soon("a split", world.split(Some(0), 0)).await;
        if member.rank.0 == 1 {
            assert_eq!(split.err(), Some(CollectiveError::TooManyGroups));
        } else {
            let group = split.unwrap().unwrap();
            let fault = fault_of(soon("a barrier", group.barrier()).await);
            assert!(matches!(fault, Fault::OutOfMemory(_)), "{fault}");
        }
        drop(own);
        world.barrier().await.unwrap();
    });
}

#[test]
fn a_group_for_which_its_founder_has_no_number_is_broken_for_who_waits_for_it() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        let own = all_numbers_of_rank_1(&member);
        let subset = soon("a subset", member.collectives.subset(&[Rank(1), Rank(0)])).await;
        if member.rank.0 == 1 {
            assert_eq!(subset.err(), Some(CollectiveError::TooManyGroups));
        } else {
            let fault = fault_of(soon("a barrier", subset.unwrap().barrier()).await);
            assert!(matches!(fault, Fault::OutOfMemory(_)), "{fault}");
        }
        drop(own);
        world.barrier().await.unwrap();
        // Later ones are told apart from it.
        let subset = soon("a subset", member.collectives.subset(&[Rank(1), Rank(0)])).await.unwrap();
        soon("a barrier", subset.barrier()).await.unwrap();
        world.barrier().await.unwrap();
    });
}

#[test]
fn a_group_that_its_founder_cannot_make_keeps_nobody_waiting() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        let members = [0, 1, 2].map(Rank);
        match member.rank.0 {
            0 => {
                // As if it had found garbage in what rank 1 sends to it alone.
                let context = &member.client.contexts()[0];
                assert!(context.enter(|engine| engine.scope().cut_off(Rank(1))).is_ok());
                let subset = soon("a subset", member.collectives.subset(&members)).await;
                assert_eq!(subset.err(), Some(Fault::PeerCorrupt(Rank(1)).into()));
            }
            2 => {
                let subset = soon("a subset", member.collectives.subset(&members)).await;
                let fault = match subset {
                    Ok(subset) => fault_of(soon("a barrier", subset.barrier()).await),
                    Err(error) => fault_of(Err::<(), _>(error)),
                };
                assert_eq!(fault, Fault::PeerCorrupt(Rank(1)));
            }
            _ => {}
        }
    });
}

#[test]
fn lengths_that_no_memory_has_are_refused_and_told() {
    type Long = fn(&Group) -> InFlight<Vec<u8>>;
    let long: [Long; 4] = [
        |group| group.scatter(0, &[], usize::MAX >> 1),
        |group| group.scatter(0, &[], 1 << 60),
        |group| group.all_to_all_v(&[], &[0; 3], &[1 << 60, 0, 0]),
        |group| group.schedule(Algorithm::TwoLevel).scatter(0, &[], 1 << 62),
    ];
    for (number, long) in long.into_iter().enumerate() {
        run(3, Setup::new(), async |member| {
            let world = member.collectives.world();
            let group = world.split(Some(0), 0).await.unwrap().unwrap();
            match member.rank.0 {
                1 => {
                    let fault = fault_of(soon("an operation", long(&group)).await);
                    assert!(matches!(fault, Fault::OutOfMemory(_)), "{number}: {fault}");
                }
                _ => {
                    let waits = soon("a broadcast", group.broadcast(1, &[0u8])).await;
                    assert!(waits.is_err(), "{number}");
                }
            }
            world.barrier().await.unwrap();
        });
    }
    for len in [usize::MAX, 1 << 60] {
        run(2, Setup::new(), async |member| {
            let world = member.collectives.world();
            let group = world.split(Some(0), 0).await.unwrap().unwrap();
            match member.rank.0 {
                1 => assert!(soon("an operation", group.broadcast_bytes(0, len, None)).await.is_err()),
                _ => assert!(soon("a broadcast", group.broadcast(1, &[0u8])).await.is_err()),
            }
            world.barrier().await.unwrap();
        });
    }
}

/// Cannot say how it cuts messages, at first.
#[derive(Debug, Default)]
struct Undecided(AtomicBool);

impl Executor for Undecided {
    fn name(&self) -> &str {
        "undecided"
    }

    fn chunk_bytes(&self) -> usize {
        assert!(self.0.swap(true, Ordering::Relaxed), "of the user's");
        1 << 20
    }

    fn begin(&self, program: &Program, turns: &[Turn]) -> Box<dyn Execution> {
        PhaseByPhase.begin(program, turns)
    }
}

#[test]
fn an_executor_that_panics_before_an_operation_begins_has_begun_none() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        let group =
            world.split(Some(0), 0).await.unwrap().unwrap().custom_executor(Arc::<Undecided>::default());
        let sum = || group.all_reduce(&[1u64; 300_000], &Reduce::sum());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(sum())));
        assert!(panicked.is_err());
        assert_eq!(soon("a sum", sum()).await.unwrap(), vec![3; 300_000]);
        drop(group);
        soon("a barrier", world.barrier()).await.unwrap();
    });
}

/// Asks for the world, for which a lock is taken, whatever it is asked itself, and as it is dropped.
#[derive(Debug)]
struct Curious(Collectives);

impl Curious {
    fn look(&self) {
        assert_eq!(self.0.world().size(), 3);
    }
}

impl Drop for Curious {
    fn drop(&mut self) {
        self.look();
    }
}

#[derive(Debug)]
struct CuriousOperation(Curious, Box<dyn Execution>);

impl Executor for Curious {
    fn name(&self) -> &str {
        "curious"
    }

    fn begin(&self, program: &Program, turns: &[Turn]) -> Box<dyn Execution> {
        self.look();
        Box::new(CuriousOperation(Curious(self.0.clone()), PhaseByPhase.begin(program, turns)))
    }
}

impl Execution for CuriousOperation {
    fn arrived(&mut self, step: Step) {
        self.0.look();
        self.1.arrived(step);
    }

    fn next(&mut self) -> Option<Turn> {
        self.0.look();
        self.1.next()
    }

    fn done(&mut self, turn: Turn) {
        self.0.look();
        self.1.done(turn);
    }
}

#[test]
fn an_executor_is_asked_and_dropped_where_no_lock_is_held() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        let curious = Arc::new(Curious(member.collectives.clone()));
        let group = world.split(Some(0), 0).await.unwrap().unwrap().custom_executor(curious);
        for len in [1, 200_000] {
            let sum = group.all_reduce(&vec![1u64; len], &Reduce::sum());
            assert_eq!(soon("a sum", sum).await.unwrap(), vec![3; len]);
        }
        // Also of one that is broken while it waits.
        match member.rank.0 {
            0 => {
                wait(20).await;
                let given = group.broadcast_bytes(0, 2, None).await;
                assert!(matches!(given, Err(CollectiveError::Length { .. })), "{given:?}");
            }
            _ => drop(soon("a sum", group.all_reduce(&[1], &Reduce::sum())).await.unwrap_err()),
        }
        drop(group);
        soon("a barrier", world.barrier()).await.unwrap();
    });
}
