//! Clients that leave while their process lives on.

use crate::support::{options, run, soon};
use posthaste::{CallError, ContextId, Fault, Message, Rank, Scope};

#[test]
fn fault_a_client_that_left_before_anybody_met_it_is_known_to_have_left() {
    run(4, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        let never = second.service("never", |()| std::future::pending::<()>()).unwrap();
        let gone = Rank(3);
        if job.rank() == gone {
            second.leave().await.unwrap();
            job.barrier().await.unwrap();
        } else {
            // One calls it when it has left, the others while it leaves, or before that.
            if job.rank() == Rank(0) {
                job.barrier().await.unwrap();
            }
            let end = soon("the call", never.call(gone, ())).await;
            assert_eq!(end, Err(CallError::Fault(Fault::PeerClosed(gone))));
            if job.rank() != Rank(0) {
                job.barrier().await.unwrap();
            }
            second.leave().await.unwrap();
        }
        // Its process lives, and so does the client that all have in common.
        job.barrier().await.unwrap();
        assert_eq!(job.stats().peers_lost, 0);
        job.barrier().await.unwrap();
    });
}

#[test]
fn fault_what_a_client_sent_before_it_left_arrives() {
    const MESSAGES: u64 = 3000;
    run(4, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        let arrived = second.counter();
        let count = arrived.clone();
        let note = second.register("note", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        let gone = Rank(3);
        if job.rank() == gone {
            // Whom it never met before, it tells at once, and leaves.
            for number in 0..MESSAGES {
                for rank in (0..3).map(Rank) {
                    note.send(rank, number.to_ne_bytes()).await.unwrap();
                }
            }
            second.leave().await.unwrap();
            job.barrier().await.unwrap();
        } else {
            job.barrier().await.unwrap();
            soon("the last message", arrived.reach(MESSAGES)).await;
            let end = loop {
                match note.send(gone, b"").await {
                    Ok(()) => tokio::task::yield_now().await,
                    Err(end) => break end,
                }
            };
            assert_eq!(end, Fault::PeerClosed(gone).into());
            assert_eq!(arrived.value(), MESSAGES);
            second.leave().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

#[test]
fn fault_a_client_whose_owner_does_not_poll_it_has_not_left_before_it_says_so() {
    run(2, options().clients(2), async |job| {
        let second = job.client(1).await.unwrap();
        let never = second.service("never", |()| std::future::pending::<()>()).unwrap();
        if job.rank() == Rank(1) {
            // Nobody is at the context while the client leaves: its goodbye waits with whatever else was posted there.
            let context = second.own_context(ContextId(0)).expect("nobody else owns it");
            second.leave().await.unwrap();
            job.barrier().await.unwrap();
            job.barrier().await.unwrap();
            drop(context);
        } else {
            let mut call = std::pin::pin!(never.call(Rank(1), ()));
            job.barrier().await.unwrap();
            let early = tokio::time::timeout(std::time::Duration::from_millis(200), &mut call).await;
            assert!(early.is_err(), "{early:?}");
            job.barrier().await.unwrap();
            let end = soon("the call", call).await;
            assert_eq!(end, Err(CallError::Fault(Fault::PeerClosed(Rank(1)))));
            second.leave().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}
