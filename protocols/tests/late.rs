//! Messages that come before their group is made, or after it has gone, and operations that nobody looks after.

#[allow(dead_code, reason = "these tests need a part of it")]
mod near;
#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use bytes::Bytes;
use futures::poll;
use near::{fault_of, soon, wait};
use posthaste_core::context::Face;
use posthaste_core::engine::PatternError;
use posthaste_core::{Collective, Fault, Messager, Rank};
use posthaste_protocols::collective::{Action, Blocks, Kind, Place, Program, Route, Schedule};
use posthaste_protocols::pattern::record;
use posthaste_protocols::stream::register_stream;
use posthaste_protocols::window::Region;
use posthaste_protocols::{CollectiveError, Group, Reduce};
use std::pin::pin;
use std::sync::Arc;
use support::{Setup, run};

const BOTH: [Rank; 2] = [Rank(0), Rank(1)];

#[test]
fn what_came_for_a_group_goes_to_no_other_that_has_its_number_by_then() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        if member.rank.0 == 0 {
            wait(5).await;
            let first = world.split(Some(0), 0).await.unwrap().unwrap();
            assert_eq!(first.broadcast(0, &[1u64]).await.unwrap(), [1]);
            drop(first);
            wait(5).await;
            let second = member.collectives.subset(&BOTH).await.unwrap();
            assert_eq!(second.broadcast(0, &[2u64]).await.unwrap(), [2]);
        } else {
            let mut split = pin!(world.split(Some(0), 0));
            assert!(poll!(&mut split).is_pending());
            wait(300).await;
            let first = split.await.unwrap().unwrap();
            assert_eq!(soon("the first", first.broadcast(0, &[0u64])).await.unwrap(), [1]);
            let second = member.collectives.subset(&BOTH).await.unwrap();
            assert_eq!(soon("the second", second.broadcast(0, &[0u64])).await.unwrap(), [2]);
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn a_board_that_is_told_before_the_group_is_made_is_looked_at() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        let sum = vec![1u64; 100_000];
        let group = if member.rank.0 == 0 {
            wait(5).await;
            world.split(Some(0), 0).await.unwrap().unwrap()
        } else {
            let mut split = pin!(world.split(Some(0), 0));
            assert!(poll!(&mut split).is_pending());
            wait(300).await;
            split.await.unwrap().unwrap()
        };
        soon("a sum", group.all_reduce(&sum, &Reduce::sum())).await.unwrap();
        for _ in 0..20 {
            group.barrier().await.unwrap();
        }
        let sent = || member.client.contexts()[0].stats().messages_sent;
        let before = sent();
        for _ in 0..100 {
            group.barrier().await.unwrap();
        }
        assert!(sent() - before < 50, "{} messages", sent() - before);
        world.barrier().await.unwrap();
    });
}

#[test]
fn an_operation_that_is_forgotten_holds_up_none_behind_it() {
    run(2, Setup::new(), async |member| {
        let world = member.collectives.world();
        near::warm(&world).await;
        std::mem::forget(world.barrier());
        let kept = world.all_reduce_one(3u64, &Reduce::sum());
        for number in 0..40_000u64 {
            let sum = soon("a sum", world.all_reduce_one(number, &Reduce::sum())).await;
            assert_eq!(sum.unwrap(), 2 * number);
        }
        assert_eq!(kept.await.unwrap(), 6);
        let sent = || member.client.contexts()[0].stats().messages_sent;
        let before = sent();
        for _ in 0..1000 {
            world.barrier().await.unwrap();
        }
        assert!(sent() - before < 100, "{} messages", sent() - before);
    });
}

#[test]
fn parts_of_windows_that_a_member_never_makes_come_back() {
    for turns in [0, 1, 3, 30] {
        run(2, Setup::new(), async |member| {
            let world = member.collectives.world();
            let rounds = |rounds, len| {
                let world = &world;
                async move {
                    for round in 0..rounds {
                        let group = world.split(Some(0), 0).await.unwrap().unwrap();
                        if world.rank() == 1 {
                            drop(group);
                        } else {
                            wait(turns).await;
                            let made = soon("a window", group.shmalloc::<u8>(len)).await;
                            assert!(made.is_err(), "round {round}");
                        }
                        soon("a barrier", world.barrier()).await.unwrap();
                    }
                }
            };
            rounds(200, 1 << 20).await;
            wait(100).await;
            if member.rank.0 == 0 {
                // Nearly all that there is.
                Region::allocate(&member.client, 12 << 20).await.unwrap();
            }
            // More than may wait for a rank that is late.
            rounds(if turns == 3 { 4200 } else { 50 }, 0).await;
        });
    }
}

#[test]
fn parts_of_windows_come_back_from_who_calls_something_else() {
    run(3, Setup::new(), async |member| {
        let world = member.collectives.world();
        for _ in 0..100 {
            let group = world.split(Some(0), 0).await.unwrap().unwrap();
            if member.rank.0 == 1 {
                assert!(soon("a barrier", group.barrier()).await.is_err());
            } else {
                assert!(soon("a window", group.shmalloc::<u8>(1 << 20)).await.is_err());
            }
            soon("a barrier", world.barrier()).await.unwrap();
        }
        wait(100).await;
        Region::allocate(&member.client, 12 << 20).await.unwrap();
    });
}

/// A schedule in which only rank 3 waits for anybody: for rank 0.
#[derive(Debug)]
struct FromFirst;

impl Schedule for FromFirst {
    fn name(&self) -> &str {
        "from the first"
    }

    fn program(&self, kind: Kind, place: &Place<'_>) -> Option<Program> {
        let mut route = Route::default();
        match place.rank {
            0 => route.send(0, 3, Blocks::one(0)),
            3 => route.receive(0, 0, Blocks::one(0), Action::Store),
            _ => {}
        }
        (kind == Kind::Reduce).then(|| Program::new(1, route))
    }
}

const REFUSED: Fault = Fault::CollectiveRefused { rank: Rank(0), call: Collective::Broadcast(2) };

/// Takes no part in the next operation of a group, and breaks it.
async fn refuse(group: &Group) {
    let given = group.broadcast_bytes(0, 2, Some(Bytes::from_static(b"1"))).await;
    assert!(matches!(given, Err(CollectiveError::Length { .. })), "{given:?}");
}

#[test]
fn that_a_group_is_broken_gets_past_members_that_are_yet_to_make_it() {
    run(8, Setup::new(), async |member| {
        let world = member.collectives.world();
        let mut split = pin!(world.split(Some(0), 0));
        let mut sum = None;
        if matches!(member.rank.0, 0 | 3 | 5) {
            // So that the others' has begun, and has not ended.
            wait(5).await;
        }
        match member.rank.0 {
            0 => {
                let group = split.await.unwrap().unwrap();
                wait(50).await;
                refuse(&group).await;
            }
            // Who does not hear of it from rank 0.
            3 | 5 => {
                let group = split.await.unwrap().unwrap();
                sum = Some(group.all_reduce(&[1], &Reduce::sum()));
            }
            _ => {
                assert!(poll!(&mut split).is_pending());
                wait(500).await;
                drop(split.await.unwrap().unwrap());
            }
        }
        if let Some(sum) = sum {
            assert_eq!(fault_of(soon("a sum", sum).await), REFUSED);
        }
        soon("a barrier", world.barrier()).await.unwrap();
    });
}

#[test]
fn that_a_group_is_broken_gets_past_members_that_have_left_it() {
    run(8, Setup::new(), async |member| {
        let world = member.collectives.world();
        let group = world.split(Some(0), 0).await.unwrap().unwrap();
        let by = group.custom_schedule(Arc::new(FromFirst));
        let value = [u64::from(member.rank.0)];
        match member.rank.0 {
            0 => {
                wait(500).await;
                refuse(&group).await;
            }
            3 => {
                let sum = by.reduce(3, &value, &Reduce::sum());
                assert_eq!(fault_of(soon("a sum", sum).await), REFUSED);
            }
            _ => assert_eq!(by.reduce(3, &value, &Reduce::sum()).await.unwrap(), None),
        }
        drop((group, by));
        soon("a barrier", world.barrier()).await.unwrap();
    });
}

#[test]
fn that_a_group_is_broken_gets_past_members_that_have_refused_it() {
    run(8, Setup::new(), async |member| {
        let world = member.collectives.world();
        let is_memory = |ended| assert!(matches!(fault_of(ended), Fault::OutOfMemory(_)));
        match member.rank.0 {
            0 => {
                let mut unasked = Vec::new();
                // Those whom it tells of a break.
                for other in [1, 2, 4, 6, 7].map(Rank) {
                    unasked
                        .extend((0..1024).map(|_| member.collectives.on_the_fly(&[Rank(0), other]).unwrap()));
                }
                wait(100).await;
                let group = member.collectives.on_the_fly(&[0, 1, 2, 3, 4, 5, 6, 7].map(Rank)).unwrap();
                is_memory(soon("a barrier", group.barrier()).await);
            }
            3 | 5 => {
                let group = soon("a group", member.collectives.arrival()).await.unwrap();
                is_memory(soon("a barrier", group.barrier()).await);
            }
            _ => {}
        }
        soon("a barrier", world.barrier()).await.unwrap();
    });
}

/// A replay that was begun for its task, and has ended by the time that this one asks about the earlier stage, tells how.
#[test]
fn a_replay_that_has_ended_badly_before_its_task_asks_tells_so() {
    run(2, Setup::tiny(), async |member| {
        let handle = member.client.contexts()[0].clone();
        let (note, _notes) = register_stream(&*member.client, handle.clone(), "note").unwrap();
        let region = Region::allocate(&member.client, 8).await.unwrap();
        member.collectives.world().barrier().await.unwrap();
        if member.rank == Rank(1) {
            // It is killed before it takes anything in.
            return;
        }
        // More than there is room for on the way.
        let pattern =
            record(&handle, |recorder| (0..100).try_for_each(|_| recorder.send(&note, Rank(1), &region)));
        let pattern = pattern.await.unwrap();
        let mut local = pin!(pattern.replay().local());
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        // Whoever is at the engine begins it for this task.
        let begun = handle.enter(|_| local.as_mut().poll(&mut cx).is_pending());
        assert!(matches!(begun, Ok(true)));
        member.client.advance();
        member.fabric.kill(Rank(1));
        member.client.advance();
        let ended = local.await.map(drop);
        assert!(matches!(ended, Err(PatternError::Fault(Fault::PeerLost(Rank(1))))), "{ended:?}");
    });
}
