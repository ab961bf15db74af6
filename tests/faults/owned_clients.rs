//! Clients that leave while somebody owns a context of theirs and does not move it. Over sockets a leave gives such a context up
//! after a while: it could not say goodbye for it.

use crate::support::{here, options, run_as, soon};
use posthaste::{CallError, ContextId, Fault, Rank};
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

#[test]
fn fault_a_client_whose_owner_does_not_poll_it_has_not_left_before_it_says_so() {
    let test = here!();
    the_owner_does_not_poll(test, 1, ContextId(0));
}

#[test]
fn fault_a_client_has_not_left_before_all_of_its_contexts_have() {
    let test = here!();
    the_owner_does_not_poll(test, 2, ContextId(1));
}
