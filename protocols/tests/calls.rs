//! Requests that are sent at once or not at all.

#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use posthaste_core::context::Face;
use posthaste_core::{CallError, Fault, Handle, Messager, Rank, SendError, TrySendError};
use posthaste_protocols::service::{ServiceOptions, register_async, register_inline};
use posthaste_protocols::{Buffer, Call, Service};
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

/// As many go out as there is credit and room for, without a wait, and are answered; then there is room again.
fn some_go_at_once(setup: Setup, most: usize, len: usize) {
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
                assert!((1..=most).contains(&calls.len()), "{} in round {round}", calls.len());
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
    some_go_at_once(Setup::tiny(), 200, 8);
    some_go_at_once(Setup::tiny(), 200, 100);
}

#[test]
fn calls_that_are_tried_take_credit_and_come_back_when_there_is_none() {
    let mut setup = Setup::new();
    setup.config.credits = 5;
    some_go_at_once(setup, 5, 8);
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
            let text = "text".to_owned();
            let tried = || double.try_call(Rank(1), &text).unwrap();
            let replies: Vec<_> = std::iter::from_fn(tried).take(10).collect();
            assert_eq!(replies.len(), 3);
            for reply in replies {
                assert_eq!(reply.await.as_deref(), Ok("texttext"));
            }
            assert!(tried().is_some(), "the credit is back");
            let unknown = SendError::UnknownRank { rank: Rank(2), size: 2 };
            let error = double.try_call(Rank(2), &text).map(|_| ()).unwrap_err();
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
