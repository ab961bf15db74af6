//! Clients that leave where ranks share memory: of what differs over sockets. There a leave gives a context up that its owner does
//! not move, for it could not say goodbye; a rank whose last client has left is not in the job again; and messages that wait at the
//! receiver keep their sender from leaving.

use crate::support::{case, here, options, run, run_as, soon};
use posthaste::{CallError, ContextId, Fault, Message, Rank, Scope};
use std::time::Duration;

/// Whoever owns a context of a client that leaves, and does not poll it: what the client has to say waits with whatever else was
/// posted there.
fn the_owner_does_not_poll(test: &str, contexts: u16, owned: ContextId) {
    run_as(test, 2, options().clients(2).contexts(contexts), async |job| {
        let second = job.client(1).await.unwrap();
        let never = second.service("never", |()| std::future::pending::<()>()).unwrap();
        if job.rank() == Rank(1) {
            let context = second.own_context(owned).expect("nobody else owns it");
            second.leave().await.unwrap();
            job.barrier().await.unwrap();
            job.barrier().await.unwrap();
            drop(context);
        } else {
            job.barrier().await.unwrap();
            let mut call = std::pin::pin!(never.call(Rank(1), ()));
            let early = tokio::time::timeout(Duration::from_millis(200), &mut call).await;
            assert!(early.is_err(), "{early:?}");
            job.barrier().await.unwrap();
            let end = soon("the call", call).await;
            assert_eq!(end, Err(CallError::Fault(Fault::PeerClosed(Rank(1)))));
            second.leave().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_a_client_whose_owner_does_not_poll_it_has_not_left_before_it_says_so);
fn fault_a_client_whose_owner_does_not_poll_it_has_not_left_before_it_says_so() {
    let test = here!();
    the_owner_does_not_poll(test, 1, ContextId(0));
}

case!(fault_a_client_has_not_left_before_all_of_its_contexts_have);
fn fault_a_client_has_not_left_before_all_of_its_contexts_have() {
    let test = here!();
    the_owner_does_not_poll(test, 2, ContextId(1));
}

case!(fault_a_rank_that_opens_a_client_after_the_last_has_left_is_lost_when_it_dies);
/// A rank whose clients have all left is in the job again when one is opened: then it can be lost.
fn fault_a_rank_that_opens_a_client_after_the_last_has_left_is_lost_when_it_dies() {
    run(2, options().clients(2).body_leaves().killed(1), async |job| {
        if job.rank() == Rank(1) {
            let again = job.clone();
            job.leave().await.unwrap();
            let second = again.client(1).await.unwrap();
            let _ready = second.service("ready", |()| async {}).unwrap();
            let never = second.service("never", |()| async {
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                    .unwrap();
            });
            never.unwrap();
            return std::future::pending().await;
        }
        let second = job.client(1).await.unwrap();
        let ready = second.service("ready", |()| async {}).unwrap();
        let never = second.service("never", |()| async {}).unwrap();
        soon("its second client", ready.call(Rank(1), ())).await.unwrap();
        let end = soon("the call", never.call(Rank(1), ())).await;
        assert_eq!(end, Err(CallError::Fault(Fault::PeerLost(Rank(1)))));
        second.leave().await.unwrap();
        job.leave().await.unwrap();
    });
}

case!(fault_an_answer_behind_what_has_to_wait_counts_though_its_sender_has_left);
fn fault_an_answer_behind_what_has_to_wait_counts_though_its_sender_has_left() {
    const MESSAGES: u64 = 40;
    run(2, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        if job.rank() == Rank(1) {
            let late = second.register("late", |_: Message, _: &mut Scope| {}).unwrap();
            let answered = job.counter();
            let count = answered.clone();
            let ask = second.service("ask", move |n: u64| {
                let (late, count) = (late.clone(), count.clone());
                async move {
                    for _ in 0..MESSAGES {
                        // More than is set aside for a name that the receiver does not know yet.
                        late.send(Rank(0), vec![7; 100_000]).await.unwrap();
                    }
                    count.add(1);
                    n + 1
                }
            });
            ask.unwrap();
            answered.reach(1).await;
            // The answer is on its way when the task has ended.
            tokio::time::sleep(Duration::from_millis(50)).await;
            second.leave().await.unwrap();
            job.barrier().await.unwrap();
        } else {
            let ask = second.service("ask", |n: u64| async move { n }).unwrap();
            let mut call = std::pin::pin!(ask.call(Rank(1), 1));
            {
                let barrier = std::pin::pin!(job.barrier());
                match futures::future::select(barrier, &mut call).await {
                    futures::future::Either::Left((met, _)) => met.unwrap(),
                    futures::future::Either::Right((end, _)) => panic!("too early: {end:?}"),
                }
            }
            let early = tokio::time::timeout(Duration::from_millis(100), &mut call).await;
            assert!(early.is_err(), "the answer lies behind what waits: {early:?}");
            let arrived = second.counter();
            let count = arrived.clone();
            let late = move |m: Message, _: &mut Scope| count.add(u64::from(m.len() == 100_000));
            let _late = second.register("late", late).unwrap();
            assert_eq!(soon("the answer", call).await, Ok(2));
            assert_eq!(arrived.value(), MESSAGES);
            let end = soon("the second call", ask.call(Rank(1), 1)).await;
            assert_eq!(end, Err(CallError::Fault(Fault::PeerClosed(Rank(1)))));
            second.leave().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(fault_a_client_that_could_not_be_opened_hears_what_was_sent_to_it_when_it_is_asked_for_again);
/// What was sent to a client before it was opened is for the one that is, however often that went wrong before.
fn fault_a_client_that_could_not_be_opened_hears_what_was_sent_to_it_when_it_is_asked_for_again() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    run(2, options().clients(2), async |job| {
        if job.rank() == Rank(1) {
            let second = job.client(1).await.unwrap();
            let note = second.register("note", |_: Message, _: &mut Scope| {}).unwrap();
            note.send(Rank(0), "early").await.unwrap();
            job.barrier().await.unwrap();
            job.barrier().await.unwrap();
            note.send(Rank(0), "late").await.unwrap();
            job.barrier().await.unwrap();
        } else {
            job.barrier().await.unwrap();
            let usual = getrlimit(Resource::Nofile);
            setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..usual }).unwrap();
            let refused = job.client(1).await;
            setrlimit(Resource::Nofile, usual).unwrap();
            assert!(refused.is_err(), "it needs no descriptor");
            let (second, arrived) = (job.client(1).await.unwrap(), job.counter());
            let count = arrived.clone();
            let _note = second.register("note", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
            soon("what was sent before", arrived.reach(1)).await;
            job.barrier().await.unwrap();
            soon("what was sent behind", arrived.reach(2)).await;
            job.barrier().await.unwrap();
        }
    });
}
