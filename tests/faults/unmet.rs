//! Peers of one node that this rank has never met.

use crate::support::{options, run, soon};
use posthaste::{CallError, Fault, Rank};

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
            // One calls it when it has left, one may do so while it leaves, and one waits already, as a rule.
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
