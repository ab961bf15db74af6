//! Messages in pages: the sender's pool, leases of the receiver, loans.

use crate::support::{case, is_payload, options, payload, run, sealed, soon, unseal, until};
use bytes::Bytes;
use posthaste::{ContextId, Endpoint, Message, OwnedMessage, Rank, Scope, TrySendError};
use std::sync::{Arc, Mutex};

/// Bytes of shared memory that this process has mapped and touched.
fn shared_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssShmem")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

case!(m_v01_a_page_lives_as_long_as_its_lease);
fn m_v01_a_page_lives_as_long_as_its_lease() {
    run(2, options(), async |job| {
        let kept: Arc<Mutex<Vec<OwnedMessage>>> = Arc::default();
        let (arrived, taken) = (job.counter(), kept.clone());
        let count = arrived.clone();
        let message = job
            .register("page", move |m: Message, _: &mut Scope| {
                if count.value() < 8 {
                    assert!(m.as_slice().is_none(), "leased, not copied");
                    taken.lock().unwrap().push(m.into_owned());
                }
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            // The pages of the first eight are held: those behind them get others, again and again.
            for number in 0..500u64 {
                message.send(Rank(1), payload(number, 50_000)).await.unwrap();
            }
        } else {
            soon("the pages", arrived.reach(500)).await;
            for (number, message) in kept.lock().unwrap().drain(..).enumerate() {
                let lease = message.into_lease().expect("a lease");
                assert!(
                    is_payload(number as u64, &lease.to_bytes()),
                    "page {number} was reused under its lease"
                );
            }
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(m_v03_a_multicast_is_one_copy_and_its_page_lives_until_the_last_receiver_is_done);
fn m_v03_a_multicast_is_one_copy_and_its_page_lives_until_the_last_receiver_is_done() {
    const LEN: usize = 512 << 10;
    const COUNT: usize = 8;
    run(4, options(), async |job| {
        let kept: Arc<Mutex<Vec<OwnedMessage>>> = Arc::default();
        let (arrived, taken, me) = (job.counter(), kept.clone(), job.rank());
        let count = arrived.clone();
        let news = job
            .register("news", move |m: Message, _: &mut Scope| {
                // What comes later is only looked at; of the first, rank 1 drops its leases at once.
                if count.value() < COUNT as u64 && me != Rank(1) {
                    assert!(m.as_slice().is_none(), "leased, not copied");
                    taken.lock().unwrap().push(m.into_owned());
                } else {
                    let number = count.value();
                    assert!(is_payload(number, &m.bytes()), "multicast {number}");
                }
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        let others = [1, 2, 3].map(Rank);
        if me == Rank(0) {
            let before = shared_memory();
            for number in 0..COUNT {
                news.multicast(others, payload(number as u64, LEN)).await.unwrap();
            }
            let grown = shared_memory() - before;
            assert!(grown < 2 * COUNT * LEN, "{grown} bytes for {COUNT} payloads of {LEN} to 3 ranks");
        } else {
            soon("the first", arrived.reach(COUNT as u64)).await;
        }
        job.barrier().await.unwrap();
        // Rank 1 has returned them, ranks 2 and 3 look at them still: their pages must not be written to.
        if me == Rank(0) {
            for number in COUNT..10 * COUNT {
                news.multicast(others, payload(number as u64, LEN)).await.unwrap();
            }
        } else {
            soon("the others", arrived.reach(10 * COUNT as u64)).await;
        }
        job.barrier().await.unwrap();
        for (number, message) in kept.lock().unwrap().drain(..).enumerate() {
            assert!(
                is_payload(number as u64, &message.into_bytes()),
                "page {number} was reused under its lease"
            );
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(m_v02_pages_are_recycled);
fn m_v02_pages_are_recycled() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("page", move |m: Message, _: &mut Scope| {
                assert!(is_payload(m.read::<u64>(0).unwrap(), &m.bytes()[8..]));
                count.add(1);
            })
            .unwrap();
        if job.rank() == Rank(0) {
            for number in 0..2000u64 {
                let mut bytes = number.to_ne_bytes().to_vec();
                bytes.extend(payload(number, 100_000));
                message.send(Rank(1), bytes).await.unwrap();
            }
            // 200 MB have gone through; few pages were touched.
            assert!(shared_memory() < 64 << 20, "{} bytes", shared_memory());
        } else {
            soon("the messages", arrived.reach(2000)).await;
            assert_eq!(job.stats().panics, 0);
        }
        job.barrier().await.unwrap();
    });
}

case!(m_v03_a_loan_is_filled_and_sent_without_a_copy_and_comes_back_unsent);
fn m_v03_a_loan_is_filled_and_sent_without_a_copy_and_comes_back_unsent() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("loan", move |m: Message, _: &mut Scope| {
                assert!(is_payload(m.info()[0].into(), &m.bytes()));
                count.add(1);
            })
            .unwrap();
        if job.rank() == Rank(0) {
            for (number, len) in [1usize, 100, 4096, 1 << 20, 4 << 20].into_iter().enumerate() {
                for _ in 0..20 {
                    let mut loan = message.loan(len);
                    while loan.is_none() {
                        tokio::task::yield_now().await;
                        loan = message.loan(len);
                    }
                    let loan = loan.unwrap();
                    assert_eq!(loan.len(), len);
                    loan.memory().write(&payload(number as u64, len));
                    message.send(Rank(1), loan).info(&[number as u8]).await.unwrap();
                }
            }
            // Dropped unsent: the pages are there again. Many more are lent than there is memory for at once.
            for _ in 0..500 {
                let loan = message.loan(4 << 20);
                drop(loan.expect("pages come back when a loan is dropped"));
            }
        } else {
            soon("the messages", arrived.reach(100)).await;
            assert_eq!(job.stats().panics, 0);
        }
        job.barrier().await.unwrap();
    });
}

case!(m_v03_loans_that_take_all_memory_are_sent_without_more);
/// Where loans have all the memory there is, a copy of one would have to wait until the receiver has given some back, and this one
/// takes nothing before all are sent.
fn m_v03_loans_that_take_all_memory_are_sent_without_more() {
    run(2, options(), async |job| {
        const LEN: usize = 4 << 20;
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("loan", move |m: Message, _: &mut Scope| {
                let number = u64::from(m.info()[0]);
                assert_eq!((m.len(), m.read(0), m.read(LEN - 8)), (LEN, Some(number), Some(!number)));
                count.add(1);
            })
            .unwrap();
        let word = job.shmalloc::<u64>(1).await.unwrap();
        // Of this one its protocol is told, too.
        if job.rank() == Rank(0) {
            let loan = message.loan(LEN).unwrap();
            loan.memory().write_u64(0, 0);
            loan.memory().write_u64(LEN - 8, !0);
            message.send(Rank(1), loan).info(&[0]).await.unwrap();
        }
        job.barrier().await.unwrap();
        if job.rank() == Rank(1) {
            soon("the first loan", arrived.reach(1)).await;
            job.barrier().await.unwrap();
            // From here on nothing is taken: the thread is here.
            word.put(Rank(0), 0, 1).await.unwrap();
            let end = std::time::Instant::now() + std::time::Duration::from_secs(40);
            while word.load(0) == Some(0) && std::time::Instant::now() < end {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let sent = word.load(0).unwrap();
            assert!((2..256).contains(&sent), "{sent} loans");
            soon("the loans", arrived.reach(1 + sent)).await;
            assert_eq!(job.stats().panics, 0);
        } else {
            job.barrier().await.unwrap();
            soon("the other's thread", word.wait_until(0, |word| word == 1)).await.unwrap();
            let all: Vec<_> = std::iter::from_fn(|| message.loan(LEN)).collect();
            // As many as may be with one receiver.
            let mut sent = 0;
            for loan in all {
                loan.memory().write_u64(0, sent);
                loan.memory().write_u64(LEN - 8, !sent);
                match message.send(Rank(1), loan).info(&[sent as u8]).try_send() {
                    Ok(()) => sent += 1,
                    Err(TrySendError::Full(_)) => break,
                    Err(error) => panic!("{error}"),
                }
                assert!(message.loan(LEN).is_none(), "after {sent} loans there is memory");
            }
            word.put(Rank(1), 0, sent).await.unwrap();
            until("all of it", || message.loan(LEN).is_some()).await;
        }
        job.barrier().await.unwrap();
    });
}

case!(m_v03_many_loans_are_sent_in_one_turn);
/// A loan is handed over as it is: however long it is, it takes no more of its task's turn than a word.
fn m_v03_many_loans_are_sent_in_one_turn() {
    run(2, options(), async |job| {
        const COUNT: u64 = 100;
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("loan", move |m: Message, _: &mut Scope| count.add(m.read::<u64>(0).unwrap_or(0)))
            .unwrap();
        if job.rank() == Rank(0) {
            // The first one is told with its protocol.
            message.send(Rank(1), 1u64.to_ne_bytes()).await.unwrap();
            tokio::task::yield_now().await;
            for number in 0..COUNT {
                let loan = message.loan(64 << 10).expect("there are pages");
                loan.memory().write_u64(0, 1);
                let sent = futures::poll!(message.send(Rank(1), loan));
                assert_eq!(
                    sent,
                    std::task::Poll::Ready(Ok(())),
                    "loan {number} has to wait for the next turn"
                );
            }
        } else {
            soon("the messages", arrived.reach(COUNT + 1)).await;
        }
        job.barrier().await.unwrap();
    });
}

case!(m_v04_a_sender_waits_while_the_box_or_the_pages_are_used_up);
fn m_v04_a_sender_waits_while_the_box_or_the_pages_are_used_up() {
    run(2, options().env("POSTHASTE_LANE_BYTES", "1024"), async |job| {
        let kept: Arc<Mutex<Vec<OwnedMessage>>> = Arc::default();
        let (arrived, taken) = (job.counter(), kept.clone());
        let count = arrived.clone();
        let page = job
            .register("page", move |m: Message, _: &mut Scope| {
                taken.lock().unwrap().push(m.into_owned());
                count.add(1);
            })
            .unwrap();
        if job.rank() == Rank(0) {
            // 600 MB do not fit into the pool of 256 MiB: the sends wait, and go on when the pages come back.
            for number in 0..300u64 {
                page.send(Rank(1), payload(number, 2 << 20)).await.unwrap();
            }
        } else {
            let mut next = 0;
            while next < 300 {
                soon("more pages", arrived.reach(next + 1)).await;
                // A slow reader.
                if next % 60 == 0 {
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                for message in std::mem::take(&mut *kept.lock().unwrap()) {
                    assert!(is_payload(next, &message.into_bytes()), "message {next}");
                    next += 1;
                }
            }
        }
        job.barrier().await.unwrap();
    });
}

case!(m_v05_mappings_are_kept);
fn m_v05_mappings_are_kept() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("page", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        let maps = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.contains("posthaste")).map(str::to_owned).collect::<Vec<_>>()
        };
        let before = maps();
        assert_eq!(before.len(), 1);
        let peer = Rank(1 - job.rank().0);
        for _ in 0..10 {
            let window = job.shmalloc::<u8>(1 << 20).await.unwrap();
            window.put_slice(peer, 0, &payload(1, 1 << 20)).await.unwrap();
            message.send(peer, payload(2, 300_000)).await.unwrap();
            window.free().await.unwrap();
        }
        until("the messages", || arrived.value() == 10).await;
        assert_eq!(maps(), before, "nothing is mapped or unmapped after the start");
        job.barrier().await.unwrap();
    });
}

/// As many loans of this length as there are.
fn all_loans(message: &posthaste::ActiveMessage, len: usize) -> Vec<posthaste::Loan> {
    // "None" may as well mean that another worker is at the context: there is none only if that is said again and again.
    let patient = || {
        (0..500).find_map(|_| {
            let loan = message.loan(len);
            if loan.is_none() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            loan
        })
    };
    std::iter::from_fn(patient).collect()
}

case!(m_v02_loans_that_were_dropped_are_lent_again_and_are_room_for_longer_ones);
fn m_v02_loans_that_were_dropped_are_lent_again_and_are_room_for_longer_ones() {
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("long", move |m: Message, _: &mut Scope| {
                assert!(is_payload(7, &m.bytes()));
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let before = shared_memory();
            for number in 0..1000 {
                let loan = message.loan(64 << 10).expect("all others were dropped");
                loan.memory().write(&[number as u8; 64 << 10]);
            }
            let grown = shared_memory() - before;
            assert!(grown < 1 << 20, "{grown} bytes for one loan at a time");
            // All that there is, in the smallest pieces, and nothing of it in use any more.
            drop(all_loans(&message, 4096));
            for len in [100_000, 3_000_000, 20_000_000] {
                soon("the message", message.send(Rank(1), payload(7, len))).await.unwrap();
            }
        } else {
            soon("the messages", arrived.reach(3)).await;
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(m_v01_a_message_that_waits_for_a_page_goes_on_when_a_loan_is_dropped);
fn m_v01_a_message_that_waits_for_a_page_goes_on_when_a_loan_is_dropped() {
    run(2, options().workers(2), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job.register("waits", move |_: Message, _: &mut Scope| count.add(1)).unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let mut loans = all_loans(&message, 1 << 20);
            let held = all_loans(&message, 4096);
            let sender = message.clone();
            let waits = tokio::spawn(async move { sender.send(Rank(1), payload(7, 100_000)).await });
            // Asleep by now, whoever drives it.
            tokio::time::sleep(std::time::Duration::from_millis(300)).await;
            assert!(!waits.is_finished() && arrived.value() == 0, "there was a page");
            loans.pop();
            soon("the message", waits).await.unwrap().unwrap();
            drop((loans, held));
        } else {
            soon("the message", arrived.reach(1)).await;
        }
        job.barrier().await.unwrap();
    });
}

case!(a_loan_may_be_sent_through_another_context_than_lent_it);
fn a_loan_may_be_sent_through_another_context_than_lent_it() {
    const LEN: usize = 100_000;
    run(2, options().contexts(2), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let message = job
            .register("lent", move |m: Message, _: &mut Scope| {
                let number = u64::from_ne_bytes(m.info().try_into().unwrap());
                assert!(is_payload(number, &m.bytes()), "payload {number} is another's");
                count.add(1);
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            let beside = message.through(job.context_handle(ContextId(1)).unwrap());
            for number in 0..20u64 {
                // The other context has messages of its own under way where it would look for the page.
                let other = 1000 + number;
                beside.send(Rank(1), payload(other, LEN)).info(&other.to_ne_bytes()).await.unwrap();
                let loan = message.loan(LEN).expect("a page");
                loan.memory().write(&payload(number, LEN));
                let own = if number % 4 == 3 { &message } else { &beside };
                own.send(Rank(1), loan).info(&number.to_ne_bytes()).await.unwrap();
            }
            // The pages of both are there still.
            for number in 0..20u64 {
                beside.send(Rank(1), payload(number, LEN)).info(&number.to_ne_bytes()).await.unwrap();
                message.send(Rank(1), payload(number, LEN)).info(&number.to_ne_bytes()).await.unwrap();
            }
        } else {
            soon("all of them", arrived.reach(80)).await;
        }
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(a_multicast_that_panics_leaves_nothing_of_it_behind);
fn a_multicast_that_panics_leaves_nothing_of_it_behind() {
    const LEN: usize = 50_000;
    run(2, options(), async |job| {
        let arrived = job.counter();
        let count = arrived.clone();
        let page = job
            .register("page", move |m: Message, _: &mut Scope| {
                assert_eq!(unseal(&m.bytes()), Some(count.value()), "it is one sent before");
                count.add(1);
            })
            .unwrap();
        // The same memory each time.
        let buffer = Arc::new(Mutex::new(Bytes::from(sealed(0, LEN))));
        let (send, first) = (page.clone(), buffer.clone());
        let fails = job
            .register("fails", move |_: Message, scope: &mut Scope| {
                let to = Endpoint::new(Rank(1), ContextId(0));
                scope.multicast(|scope| {
                    assert!(send.send_in(scope, to, first.lock().unwrap().clone()).is_ok());
                    panic!("on purpose");
                });
            })
            .unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            fails.send(Rank(0), "").await.unwrap();
            until("it has failed", || job.stats().panics == 1).await;
            for number in 1..20u64 {
                let again = std::mem::take(&mut *buffer.lock().unwrap());
                let mut memory = again.try_into_mut().expect("nobody else has it");
                memory.copy_from_slice(&sealed(number, LEN));
                let again = memory.freeze();
                *buffer.lock().unwrap() = again.clone();
                page.send(Rank(1), again).await.unwrap();
            }
        } else {
            soon("all of them", arrived.reach(20)).await;
            assert_eq!(job.stats().panics, 0);
        }
        job.barrier().await.unwrap();
    });
}

case!(whoever_keeps_messages_gets_copies_past_a_share_of_the_senders_pages);
fn whoever_keeps_messages_gets_copies_past_a_share_of_the_senders_pages() {
    const LEN: usize = 2 << 20;
    const COUNT: u64 = 200; // more than the pool has room for
    run(2, options(), async |job| {
        let (data, mut datas) = job.stream("data").unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(0) {
            for number in 0..COUNT {
                soon("a page", data.send(Rank(1), sealed(number, LEN))).await.unwrap();
            }
        } else {
            let mut kept = Vec::new();
            while kept.len() < COUNT as usize {
                kept.push(soon("a message", datas.recv()).await.unwrap());
            }
            let copies = kept.iter().filter(|message| message.as_slice().is_some()).count();
            assert!(copies > 0 && copies < kept.len(), "{copies} of {} were copied out", kept.len());
            for (number, message) in kept.into_iter().enumerate() {
                assert_eq!(unseal(&message.into_bytes()), Some(number as u64), "message {number}");
            }
        }
        job.barrier().await.unwrap();
    });
}
