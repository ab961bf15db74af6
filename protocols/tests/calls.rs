//! Requests that are sent at once or not at all.

#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use posthaste_core::context::Face;
use posthaste_core::{CallError, Fault, Handle, Messager, Rank, SendError, TrySendError};
use posthaste_protocols::service::{ServiceOptions, register_async, register_inline};
use posthaste_protocols::{Buffer, Call, Service};
use std::pin::Pin;
use std::time::Duration;
use support::{Member, Setup, run};

fn handle(member: &Member) -> Handle {
    member.client.contexts()[0].clone()
}

/// Asks rank 1 until there is no room; the calls that went out.
fn until_full<'s>(echo: &'s Service<bytes::Bytes, bytes::Bytes>, len: usize) -> Vec<Call<'s, Handle>> {
    let mut calls = Vec::new();
    loop {
        let payload = vec![calls.len() as u8; len];
        let call = echo.call_bytes(Rank(1), payload.clone()).info(b"i").deadline(Duration::from_secs(100));
        match call.try_send() {
            Ok(call) => calls.push(call),
            Err(TrySendError::Full(back)) => {
                assert_eq!(back.into_bytes(), payload, "what was not sent comes back");
                return calls;
            }
            Err(error) => panic!("{error}"),
        }
        assert!(calls.len() < 10_000, "no end of room");
    }
}

/// As many go out as there is credit and room for, without a wait, and are answered; then there is room again, for as many as are
/// told, if they are.
fn some_go_at_once(setup: Setup, room: Option<usize>, len: usize) {
    run(2, setup, async |member| {
        let echo = register_inline(&*member.client, handle(&member), "echo", |message, _| {
            assert_eq!(message.info(), b"i");
            Ok(Buffer::copy(&message.bytes()))
        });
        let echo = echo.unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        if member.rank == Rank(0) {
            for round in 0..3 {
                let calls = until_full(&echo, len);
                assert!((1..200).contains(&calls.len()), "{} in round {round}", calls.len());
                assert_eq!(room.unwrap_or(calls.len()), calls.len(), "in round {round}");
                // One that has gone out is what it is.
                for (number, call) in calls.into_iter().enumerate() {
                    let answer = call.try_send().unwrap().await.unwrap();
                    assert_eq!(answer.as_bytes(), vec![number as u8; len]);
                }
            }
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn calls_that_are_tried_go_out_as_long_as_there_is_room_and_come_back_when_there_is_none() {
    // Words, what goes into a packet, and what is queued in several.
    [8, 100, 1000].into_iter().for_each(|len| some_go_at_once(Setup::tiny(), None, len));
}

#[test]
fn calls_that_are_tried_take_credit_and_come_back_when_there_is_none() {
    let mut setup = Setup::new();
    setup.config.credits = 5;
    some_go_at_once(setup, Some(5), 8);
}

#[test]
fn a_value_that_is_tried_is_answered_or_stays_with_whoever_asks() {
    let mut setup = Setup::new();
    setup.config.credits = 3;
    run(2, setup, async |member| {
        let double = |text: String, _: Rank| async move { text.repeat(2) };
        let options = ServiceOptions::default();
        let double = register_async(&*member.client, handle(&member), "double", options, double).unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        if member.rank == Rank(0) {
            // The value need not live as long as its reply.
            let tried = || double.try_call(Rank(1), &"text".to_owned()).unwrap();
            for _ in 0..3 {
                let replies: Vec<_> = std::iter::from_fn(tried).take(10).collect();
                assert_eq!(replies.len(), 3, "all credit is back");
                for reply in replies {
                    assert_eq!(reply.await.as_deref(), Ok("texttext"));
                }
            }
            let unknown = SendError::UnknownRank { rank: Rank(2), size: 2 };
            let error = double.try_call(Rank(2), &"text".to_owned()).map(|_| ()).unwrap_err();
            assert_eq!(error, CallError::from(unknown));
        }
        world.barrier().await.unwrap();
    });
}

#[test]
fn what_cannot_be_asked_comes_back_with_its_reason() {
    run(1, Setup::new(), async |member| {
        let handle = handle(&member);
        let echo = register_inline(&*member.client, handle.clone(), "echo", |_, _| Ok(Buffer::copy(&[])));
        let echo = echo.unwrap();
        let refused = |rank: u32, info: &[u8]| match echo
            .call_bytes(Rank(rank), "asked")
            .info(info)
            .try_send()
            .map(drop)
        {
            Err(TrySendError::Failed { error, payload }) => {
                assert_eq!(payload.into_bytes(), b"asked"[..]);
                error
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(1, b""), SendError::UnknownRank { rank: Rank(1), size: 1 });
        assert_eq!(refused(0, &[0; 113]), SendError::InfoTooLong { len: 113 });
        // Who cannot get at the engine does not wait for it, whether it could be asked or not.
        let busy = handle.enter(|_| {
            assert_eq!(refused(1, b""), SendError::UnknownRank { rank: Rank(1), size: 1 });
            matches!(echo.call_bytes(Rank(0), "asked").try_send(), Err(TrySendError::Full(_)))
        });
        assert!(busy.unwrap_or(false));
        member.client.close().await;
        assert_eq!(refused(0, b""), SendError::Fault(Fault::Shutdown));
    });
}

#[test]
fn a_call_that_waits_for_credit_is_taken_back_and_tried_and_one_that_was_tried_keeps_its_deadline() {
    let mut setup = Setup::new();
    setup.config.credits = 1;
    run(2, setup, async |member| {
        let echo = register_inline(&*member.client, handle(&member), "echo", |message, _| {
            Ok(Buffer::copy(&message.bytes()))
        });
        let echo = echo.unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        if member.rank == Rank(0) {
            let first = echo.call_bytes(Rank(1), "first").try_send().unwrap();
            // There is no credit for it: it waits, and would go on to wait.
            let mut second = echo.call_bytes(Rank(1), "second");
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(Pin::new(&mut second).poll(&mut context).is_pending());
            match second.try_send() {
                Err(TrySendError::Full(back)) => assert_eq!(back.into_bytes(), "second"),
                other => panic!("{other:?}"),
            }
            assert_eq!(first.await.unwrap().as_bytes(), b"first");
            // The other rank cannot answer before this one lets it.
            let mut third = echo.call_bytes(Rank(1), "third").deadline(Duration::ZERO).try_send().unwrap();
            let ended = (0..10_000).find_map(|_| {
                std::thread::sleep(Duration::from_millis(1));
                handle(&member).advance();
                match Pin::new(&mut third).poll(&mut context) {
                    std::task::Poll::Ready(ended) => Some(ended),
                    std::task::Poll::Pending => None,
                }
            });
            assert_eq!(ended.unwrap().unwrap_err(), CallError::Fault(Fault::DeadlineExceeded));
        }
        world.barrier().await.unwrap();
    });
}
