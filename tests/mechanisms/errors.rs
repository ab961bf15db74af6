//! Every error that a user can cause is typed, and told before anything is sent where the sender can know.

use crate::support::{case, options, run, soon, until};
use posthaste::{
    Bytes, CallError, Error, Fault, JoinError, Message, Rank, RegionKey, RegisterError, RmaError, Scope,
    SendError,
};
use std::sync::{Arc, Mutex};

case!(error_info_of_113_bytes_is_refused);
fn error_info_of_113_bytes_is_refused() {
    run(2, options(), async |job| {
        let message = job.register("info", |_: Message, _: &mut Scope| {}).unwrap();
        let peer = Rank(1 - job.rank().0);
        let refused = message.send(peer, b"x").info(&[1; 113]).await;
        assert_eq!(refused, Err(SendError::InfoTooLong { len: 113 }));
        let refused = message.send(peer, vec![1; 1 << 20]).info(&[1; 300]).await;
        assert_eq!(refused, Err(SendError::InfoTooLong { len: 300 }));
        message.send(peer, b"x").info(&[1; 112]).await.unwrap();
        assert_eq!(job.stats().messages_sent, 1, "what is refused is not sent");
        job.barrier().await.unwrap();
    });
}

case!(error_an_unknown_rank_is_refused_by_every_operation);
fn error_an_unknown_rank_is_refused_by_every_operation() {
    run(2, options(), async |job| {
        let message = job.register("message", |_: Message, _: &mut Scope| {}).unwrap();
        let service = job.service("service", |number: u8| async move { number }).unwrap();
        let window = job.shmalloc::<u64>(4).await.unwrap();
        let nobody = Rank(2);
        let unknown = SendError::UnknownRank { rank: nobody, size: 2 };
        assert_eq!(message.send(nobody, b"x").await, Err(unknown.clone()));
        assert_eq!(message.send(Rank(u32::MAX), b"x").await.map_err(|e| e.to_string().len() > 10), Err(true));
        assert_eq!(service.call(nobody, 1).await, Err(CallError::Send(unknown)));
        let unknown = RmaError::UnknownRank { rank: nobody, size: 2 };
        assert_eq!(window.put(nobody, 0, 1).await, Err(unknown.clone()));
        assert_eq!(window.get(nobody, 0).await, Err(unknown.clone()));
        assert_eq!(window.get_slice(nobody, 0, 2).await, Err(unknown.clone()));
        let key = RegionKey { rank: Rank(2), offset: 0, len: 8, incarnation: 0 };
        assert!(matches!(job.remote_region(key).await, Err(Error::Rma(RmaError::UnknownRank { .. }))));
        assert_eq!(window.len(nobody), 0);
        job.barrier().await.unwrap();
    });
}

case!(error_a_failed_send_gives_its_payload_back);
/// What could not be sent is still its owner's: in place, as bytes that are not copied, and as a loan.
fn error_a_failed_send_gives_its_payload_back() {
    run(2, options(), async |job| {
        let message = job.register("message", |_: Message, _: &mut Scope| {}).unwrap();
        let service = job.service_inline("service", |m, _| Ok(m.to_bytes().into())).unwrap();
        let bytes = Bytes::from(vec![7; 100_000]);
        for payload in [b"in place".to_vec().into(), bytes.clone()] {
            let mut send = message.send(Rank(2), payload.clone());
            assert!((&mut send).await.is_err());
            let back = send.into_payload().expect("nothing was sent").into_bytes();
            assert_eq!((back.as_ptr(), &back), (payload.as_ptr(), &payload));
            let mut call = service.call_bytes(Rank(2), payload.clone());
            assert!((&mut call).await.is_err());
            assert_eq!(call.into_payload().expect("nothing was asked").into_bytes(), payload);
        }
        let mut send = message.send(Rank(1 - job.rank().0), bytes);
        (&mut send).await.unwrap();
        assert!(send.into_payload().is_none(), "it is on its way");
        assert!(message.send(Rank(0), b"not begun").into_payload().is_some());
        job.barrier().await.unwrap();
    });
}

case!(error_an_access_out_of_range_is_refused_before_anything_is_touched);
fn error_an_access_out_of_range_is_refused_before_anything_is_touched() {
    run(2, options(), async |job| {
        let len = [10usize, 0][job.rank().index()];
        let window = job.shmalloc::<u32>(len).await.unwrap();
        let outside =
            |offset, count, len, rank| Err(RmaError::OutOfRange { rank: Rank(rank), offset, count, len });
        assert_eq!(window.put(Rank(0), 10, 1).await, outside(40, 4, 40, 0));
        assert_eq!(window.put(Rank(1), 0, 1).await, outside(0, 4, 0, 1));
        assert_eq!(window.put_slice(Rank(0), 8, &[1, 2, 3]).await, outside(32, 12, 40, 0));
        assert_eq!(window.get(Rank(0), 10).await.map(|_| ()), outside(40, 4, 40, 0));
        assert_eq!(window.get_slice(Rank(0), 1, 10).await.map(|_| ()), outside(4, 40, 40, 0));
        // Absurd numbers do not wrap around.
        assert!(window.put(Rank(0), usize::MAX, 1).await.is_err());
        assert!(window.put(Rank(0), usize::MAX / 4 + 1, 1).await.is_err());
        assert!(window.get_slice(Rank(0), 1, usize::MAX).await.is_err());
        assert!(window.get_into(Rank(0), usize::MAX, vec![0; 10]).await.is_err());
        let mut slice = [7; 10];
        assert_eq!(window.get_to(Rank(0), 1, &mut slice).await, outside(4, 40, 40, 0));
        assert!(window.get_to(Rank(0), usize::MAX, &mut slice).await.is_err());
        assert_eq!(slice, [7; 10], "nothing has come");
        // The end itself is inside, for nothing.
        window.put_slice(Rank(0), 10, &[]).await.unwrap();
        job.barrier().await.unwrap();
        assert_eq!(window.to_vec(), vec![0; len], "nothing was touched");
        assert_eq!(window.load(len), None);
        assert!(!window.store(len, 1));
        let region = job.region(100).await.unwrap();
        assert!(region.write(99, &[1, 2]).is_err());
        assert!(region.read(usize::MAX, &mut [0]).is_err());
        job.barrier().await.unwrap();
    });
}

case!(error_a_freed_window_does_not_exist_any_more);
fn error_a_freed_window_does_not_exist_any_more() {
    run(2, options(), async |job| {
        let window = job.shmalloc::<u64>(10).await.unwrap();
        let (clone, peer) = (window.clone(), Rank(1 - job.rank().0));
        window.free().await.unwrap();
        assert!(matches!(clone.put(peer, 0, 1).await, Err(RmaError::NoSuchWindow(_))));
        assert!(matches!(clone.get(peer, 0).await, Err(RmaError::NoSuchWindow(_))));
        assert!(matches!(clone.bytes().get_slice(peer, 0, 4).await, Err(RmaError::NoSuchWindow(_))));
        assert_eq!((clone.load(0), clone.store(0, 1)), (None, false));
        job.barrier().await.unwrap();
    });
}

case!(error_a_protocol_that_the_target_lacks_is_refused_once_the_target_is_ready);
fn error_a_protocol_that_the_target_lacks_is_refused_once_the_target_is_ready() {
    run(2, options(), async |job| {
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        job.on_error(move |fault| faults.lock().unwrap().push(fault));
        if job.rank() == Rank(0) {
            let message = job.register("only here", |_: Message, _: &mut Scope| {}).unwrap();
            let service = job.service("only here, too", |number: u8| async move { number }).unwrap();
            let (credited, _stream) = job.stream("only here, credited").unwrap();
            let refused = Fault::NoSuchProtocol(Rank(1));
            job.barrier().await.unwrap();
            assert_eq!(service.call(Rank(1), 1).await, Err(CallError::Fault(refused)));
            message.send(Rank(1), b"before it is known").await.unwrap();
            until("the refusal", || told.lock().unwrap().contains(&refused)).await;
            assert_eq!(message.send(Rank(1), b"after").await, Err(SendError::Fault(refused)));
            assert_eq!(service.call(Rank(1), 1).await, Err(CallError::Fault(refused)));
            assert_eq!(message.send(Rank(1), vec![1; 9 << 20]).await, Err(SendError::Fault(refused)));
            let mut ended = Ok(());
            while ended.is_ok() {
                ended = soon("the refusal", credited.send(Rank(1), vec![2; 5 << 20])).await;
            }
            assert_eq!(ended, Err(SendError::Fault(refused)));
            // To oneself it goes.
            service.call(Rank(0), 1).await.unwrap();
        } else {
            job.barrier().await.unwrap();
        }
        job.barrier().await.unwrap();
    });
}

case!(error_another_type_under_the_same_name_is_a_schema_mismatch);
fn error_another_type_under_the_same_name_is_a_schema_mismatch() {
    run(2, options(), async |job| {
        let told: Arc<Mutex<Vec<Fault>>> = Arc::default();
        let faults = told.clone();
        job.on_error(move |fault| faults.lock().unwrap().push(fault));
        let peer = Rank(1 - job.rank().0);
        let mismatch = Fault::SchemaMismatch(peer);
        let right = job.register_typed("right", |_: [u32; 2], _, _: &mut Scope| {}).unwrap();
        let wrong = if job.rank() == Rank(0) {
            let message =
                job.register_typed("wrong", |_: u64, _, _: &mut Scope| panic!("dispatched")).unwrap();
            let call = job.service("sum", |numbers: Vec<u8>| async move { numbers.len() as u32 }).unwrap();
            job.barrier().await.unwrap();
            assert_eq!(call.call(peer, vec![1]).await, Err(CallError::Fault(mismatch)));
            message.send(peer, &1).await
        } else {
            let message =
                job.register_typed("wrong", |_: f64, _, _: &mut Scope| panic!("dispatched")).unwrap();
            let call = job.service("sum", |numbers: Vec<u16>| async move { numbers.len() as u32 }).unwrap();
            job.barrier().await.unwrap();
            assert_eq!(call.call(peer, vec![1]).await, Err(CallError::Fault(mismatch)));
            message.send(peer, &1.0).await
        };
        wrong.unwrap();
        until("the refusal", || told.lock().unwrap().iter().filter(|fault| **fault == mismatch).count() >= 1)
            .await;
        right.send(peer, &[1, 2]).await.unwrap();
        job.barrier().await.unwrap();
        assert_eq!(job.stats().panics, 0);
    });
}

case!(error_names_are_taken_once_and_have_1_to_64_bytes);
fn error_names_are_taken_once_and_have_1_to_64_bytes() {
    run(1, options(), async |job| {
        let register = |name: &str| job.register(name, |_: Message, _: &mut Scope| {}).map(|_| ());
        register("name").unwrap();
        assert_eq!(register("name"), Err(RegisterError::Taken("name".into())));
        assert_eq!(job.stream("name").map(|_| ()).unwrap_err(), RegisterError::Taken("name".into()));
        assert_eq!(register(""), Err(RegisterError::BadName(String::new())));
        register(&"n".repeat(64)).unwrap();
        assert_eq!(register(&"n".repeat(65)), Err(RegisterError::BadName("n".repeat(65))));
    });
}

case!(error_a_job_that_was_left_is_closed);
fn error_a_job_that_was_left_is_closed() {
    run(2, options().body_leaves(), async |job| {
        let message = job.register("message", |_: Message, _: &mut Scope| {}).unwrap();
        let service = job.service("service", |number: u8| async move { number }).unwrap();
        let (_, mut stream) = job.stream("stream").unwrap();
        let window = job.shmalloc::<u64>(10).await.unwrap();
        job.barrier().await.unwrap();
        let left = job.clone();
        job.leave().await.unwrap();
        let peer = Rank(1 - left.rank().0);
        let closed = |fault: Option<Fault>| matches!(fault, Some(Fault::Shutdown));
        let fault = |error: SendError| match error {
            SendError::Fault(fault) => Some(fault),
            _ => None,
        };
        assert!(closed(message.send(peer, b"x").await.err().and_then(fault)));
        assert!(closed(message.send(left.rank(), b"x").await.err().and_then(fault)));
        assert_eq!(service.call(peer, 1).await, Err(CallError::Fault(Fault::Shutdown)));
        assert!(soon("the stream", stream.recv()).await.is_none());
        assert!(soon("the barrier", left.barrier()).await.is_err());
        assert!(soon("the window", left.shmalloc::<u8>(10)).await.is_err());
        assert!(matches!(left.register("late", |_: Message, _: &mut Scope| {}), Err(RegisterError::Closed)));
        drop(window);
    });
}

case!(error_a_peer_that_has_left_in_order_is_closed_and_not_lost);
fn error_a_peer_that_has_left_in_order_is_closed_and_not_lost() {
    run(2, options().body_leaves(), async |job| {
        let message = job.register("message", |_: Message, _: &mut Scope| {}).unwrap();
        let service = job.service("service", |number: u8| async move { number }).unwrap();
        job.barrier().await.unwrap();
        if job.rank() == Rank(1) {
            job.leave().await.unwrap();
            return;
        }
        let fault = loop {
            match message.send(Rank(1), b"x").await {
                Ok(()) => tokio::task::yield_now().await,
                Err(error) => break error,
            }
        };
        assert_eq!(fault, SendError::Fault(Fault::PeerClosed(Rank(1))));
        assert_eq!(service.call(Rank(1), 1).await, Err(CallError::Fault(Fault::PeerClosed(Rank(1)))));
        assert!(soon("the barrier", job.barrier()).await.is_err());
        job.leave().await.unwrap();
    });
}

case!(error_a_process_of_no_job_is_told_so);
fn error_a_process_of_no_job_is_told_so() {
    if std::env::var_os("POSTHASTE_JOB").is_some() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = runtime.block_on(posthaste::join()).unwrap_err();
    assert!(matches!(error, Error::Join(JoinError::NoJob)));
    assert!(error.to_string().contains("posthaste run"), "{error}");
}
