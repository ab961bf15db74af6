//! Ranks that never had a connection with each other.

use crate::support::{case, options, run, run_unjoined, soon, until};
use posthaste::{Fault, Rank};
use std::sync::{Arc, Mutex};
use std::time::Duration;

case!(fault_the_death_and_the_leave_of_ranks_that_were_never_met_are_told);
fn fault_the_death_and_the_leave_of_ranks_that_were_never_met_are_told() {
    run(4, options().body_leaves().killed(2), async |job| {
        let told = Arc::new(Mutex::new(Vec::new()));
        let log = told.clone();
        job.on_error(move |fault| log.lock().unwrap().push(fault));
        // Nobody talks to anybody: what is known of the others was heard.
        match job.rank() {
            Rank(1) => job.leave().await.unwrap(),
            Rank(2) => {
                tokio::time::sleep(Duration::from_millis(300)).await;
                crate::support::kill_self();
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
            _ => {
                // The other one that waits here may have seen both and left meanwhile.
                let other = Rank(3 - job.rank().0);
                let of_others = || {
                    let mut ends = told.lock().unwrap().clone();
                    ends.retain(|fault| *fault != Fault::PeerClosed(other));
                    ends
                };
                until("both ends", || of_others().len() >= 2).await;
                let mut ends = of_others();
                ends.sort_by_key(|fault| fault.peer());
                assert_eq!(ends, [Fault::PeerClosed(Rank(1)), Fault::PeerLost(Rank(2))]);
                // Who is gone is not waited for.
                let word = job.register("word", |_, _| {}).unwrap();
                let error = soon("the send", word.send(Rank(2), "late")).await.unwrap_err();
                assert_eq!(error, Fault::PeerLost(Rank(2)).into());
                soon("the leave", job.leave()).await.unwrap();
            }
        }
    });
}

case!(fault_ranks_miss_one_that_would_share_memory_and_are_told_what_it_lacks);
fn fault_ranks_miss_one_that_would_share_memory_and_are_told_what_it_lacks() {
    let shell = "test $POSTHASTE_RANK != 1 || unset POSTHASTE_DEVICE";
    let options = options().after_shell_command(shell).env("POSTHASTE_JOIN_TIMEOUT", "10").any_end();
    let printed = run_unjoined(3, options, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        match runtime.block_on(posthaste::join()) {
            // Alone, and believing that the others share its memory.
            Ok(job) => println!("joined as {}", job.rank()),
            Err(error) => {
                println!("not joined: {error}");
                std::process::exit(3);
            }
        }
    });
    for rank in [0, 2] {
        let text = &printed[rank];
        assert!(text.contains("1 of 3 ranks") && text.contains("rank 1"), "{text}");
        assert!(text.contains("whichever rank of the host lacks it shares memory"), "{text}");
    }
}
