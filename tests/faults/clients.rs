//! Clients that leave while their process lives on.

use crate::support::{barrier_before_death, case, here, options, run, run_as, soon, until, wait_for};
use posthaste::{CallError, ConnectionManager, Fault, LossCause, Message, Part, Rank, Scope};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The client with that number is left by one before anybody has met it.
fn a_client_leaves_unmet(test: &str, number: u16) {
    run_as(test, 4, options().clients(number + 1), async move |job| {
        let second = job.client(number).await.unwrap();
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

case!(fault_a_client_that_left_before_anybody_met_it_is_known_to_have_left);
fn fault_a_client_that_left_before_anybody_met_it_is_known_to_have_left() {
    let test = here!();
    a_client_leaves_unmet(test, 1);
}

case!(fault_a_client_with_a_high_number_that_left_before_anybody_met_it_is_known_to_have_left);
fn fault_a_client_with_a_high_number_that_left_before_anybody_met_it_is_known_to_have_left() {
    let test = here!();
    a_client_leaves_unmet(test, 64);
}

case!(fault_what_a_client_sent_before_it_left_arrives);
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

case!(fault_a_rank_that_left_is_known_to_have_left_though_its_process_keeps_a_clone_of_the_job);
fn fault_a_rank_that_left_is_known_to_have_left_though_its_process_keeps_a_clone_of_the_job() {
    // Its process goes on until the others have been told.
    let told = options().body_leaves().killed(2).during(|job| {
        (0..2).for_each(|rank| wait_for(job, rank, "is told"));
        job.kill(2).unwrap();
    });
    run(3, told, async |job| {
        let (me, gone) = (job.rank(), Rank(2));
        let never = job.service("never", |()| std::future::pending::<()>()).unwrap();
        if me == gone {
            // It has met nobody.
            let _clone = job.clone();
            job.leave().await.unwrap();
            return std::future::pending().await;
        }
        let end = soon("the call", never.call(gone, ())).await;
        assert_eq!(end, Err(CallError::Fault(Fault::PeerClosed(gone))));
        println!("is told");
        job.leave().await.unwrap();
    });
}

case!(fault_ranks_leave_though_each_holds_what_the_other_has_sent_under_a_name_that_it_has_not);
fn fault_ranks_leave_though_each_holds_what_the_other_has_sent_under_a_name_that_it_has_not() {
    run(2, options().body_leaves(), async |job| {
        let (me, peer) = (job.rank(), Rank(1 - job.rank().0));
        let word =
            job.register(&format!("of {me}"), |_: posthaste::Message, _: &mut posthaste::Scope| {}).unwrap();
        // More than is set aside for a name that may come yet, and than there is room for on the way.
        let sends = (0..3000).map(|_| word.send(peer, vec![7; 8000]));
        let sends = tokio::time::timeout(Duration::from_millis(500), futures::future::join_all(sends));
        match sends.await {
            Err(_still_waiting) => {}
            // The other one has left first: it holds nothing any more.
            Ok(ended) => println!("{} were sent", ended.iter().filter(|sent| sent.is_ok()).count()),
        }
        soon("the leave", job.leave()).await.unwrap();
    });
}

case!(fault_a_client_goes_on_when_the_one_that_was_opened_before_it_has_left);
fn fault_a_client_goes_on_when_the_one_that_was_opened_before_it_has_left() {
    run(3, options().clients(2).killed(2).body_leaves(), async |job| {
        let second = job.client(1).await.unwrap();
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        second.on_error(move |fault| faults.lock().unwrap().push(fault));
        let echo = second.service("echo", |number: u64| async move { number }).unwrap();
        second.barrier().await.unwrap();
        job.leave().await.unwrap();
        second.barrier().await.unwrap();
        let (me, gone) = (second.rank(), Rank(2));
        if me != gone {
            for number in 0..20 {
                // Long enough for the other to sleep.
                tokio::time::sleep(Duration::from_millis(10)).await;
                assert_eq!(soon("an answer", echo.call(Rank(1 - me.0), number)).await, Ok(number));
            }
        }
        barrier_before_death(&second, gone).await;
        if me == gone {
            let pid = rustix::process::getpid();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        until("the death", || told.lock().unwrap().contains(&Fault::PeerLost(gone))).await;
        second.leave().await.unwrap();
    });
}

case!(fault_a_client_that_is_opened_after_a_death_knows_of_it);
fn fault_a_client_that_is_opened_after_a_death_knows_of_it() {
    run(3, options().clients(2).killed(2).body_leaves(), async |job| {
        let gone = Rank(2);
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        job.on_error(move |fault| faults.lock().unwrap().push(fault));
        barrier_before_death(&job, gone).await;
        if job.rank() == gone {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        }
        until("the death", || told.lock().unwrap().contains(&Fault::PeerLost(gone))).await;
        let second = job.client(1).await.unwrap();
        // Nothing is sent, so the lane tells nothing.
        let part = Part { source: gone, offset: 0, len: 8 };
        let connection = ConnectionManager::new(1).open().await.id();
        let receive = second.many_to_many().receive(connection, 8, &[part]).unwrap();
        let received = soon("the end of the receive", receive).await.unwrap();
        assert_eq!(received.parts, [Err(Fault::PeerLost(gone))]);
        // Where it was not connected with, others tell of it.
        let causes = [Some(LossCause::Exited), Some(LossCause::Told)];
        assert!(causes.contains(&second.loss_of(gone)), "{:?}", second.loss_of(gone));
        second.leave().await.unwrap();
        job.leave().await.unwrap();
    });
}
