//! Messages and requests that are sent at once or not at all, or taken back.

#[allow(dead_code, reason = "these tests need a part of it")]
mod support;

use posthaste_core::context::Face;
use posthaste_core::{CallError, Fault, Handle, Messager, Rank, SendError, TrySendError};
use posthaste_protocols::send::SendMessage;
use posthaste_protocols::service::{ServiceOptions, register_async, register_inline};
use posthaste_protocols::stream::register_stream;
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

fn poll_once<W: Future + Unpin>(wait: &mut W) -> std::task::Poll<W::Output> {
    Pin::new(wait).poll(&mut std::task::Context::from_waker(std::task::Waker::noop()))
}

/// What is queued cannot be taken back: who tries it is told that it is on its way, and so it is, once.
#[test]
fn a_message_that_is_queued_is_told_as_sent() {
    run(2, Setup::tiny(), async |member| {
        let (note, mut notes) = register_stream(&*member.client, handle(&member), "note").unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        // It goes in many packets, and there is room for two.
        let long: Vec<u8> = (0..5000).map(|at| at as u8).collect();
        if member.rank == Rank(0) {
            let mut sent = note.send(Rank(1), long);
            assert!(poll_once(&mut sent).is_pending());
            assert_eq!(sent.try_send().map_err(|error| error.to_string()), Ok(()));
            let mut sent = note.send(Rank(1), "the last");
            (&mut sent).await.unwrap();
            assert_eq!(sent.try_send().map_err(|error| error.to_string()), Ok(()), "it has ended well");
        } else {
            assert!(notes.recv().await.unwrap().bytes() == long);
            assert_eq!(notes.recv().await.unwrap().text(), "the last");
        }
        world.barrier().await.unwrap();
    });
}

/// What another one is to begin who is at the context is taken back before it has: nothing is sent.
#[test]
fn what_waits_for_the_context_is_taken_back_and_not_sent() {
    run(1, Setup::new(), async |member| {
        let handle = handle(&member);
        let (note, mut notes) = register_stream(&*member.client, handle.clone(), "note").unwrap();
        let echo = register_inline(&*member.client, handle.clone(), "echo", |message, _| {
            assert_eq!(message.text(), "asked at last");
            Ok(Buffer::copy(&message.bytes()))
        });
        let echo = echo.unwrap();
        let taken = handle.enter(|_| {
            let mut begun: Vec<_> = (0..3).map(|_| note.send(Rank(0), "taken back")).collect();
            assert!(begun.iter_mut().all(|send| poll_once(send).is_pending()));
            // One is dropped, one asked for, and one tried, for which there is no way now.
            drop(begun.pop());
            let payload = begun.pop().and_then(SendMessage::into_payload);
            assert_eq!(payload.map(|back| back.into_bytes()), Some("taken back".into()));
            match begun.pop().map(SendMessage::try_send) {
                Some(Err(TrySendError::Full(back))) => assert_eq!(back.into_bytes(), "taken back"),
                other => panic!("{other:?}"),
            }
            let mut begun: Vec<_> = (0..3).map(|_| echo.call_bytes(Rank(0), "taken back")).collect();
            assert!(begun.iter_mut().all(|call| poll_once(call).is_pending()));
            drop(begun.pop());
            let payload = begun.pop().and_then(Call::into_payload);
            assert_eq!(payload.map(|back| back.into_bytes()), Some("taken back".into()));
            match begun.pop().map(|call| call.try_send().map(drop)) {
                Some(Err(TrySendError::Full(back))) => assert_eq!(back.into_bytes(), "taken back"),
                other => panic!("{other:?}"),
            }
        });
        assert!(taken.is_ok());
        // Begun by whoever was at the context, as it left: it is on its way, and who tries it is told so.
        let mut sent = note.send(Rank(0), "sent");
        let mut asked = echo.call_bytes(Rank(0), "asked at last");
        let begun = handle.enter(|_| (poll_once(&mut sent).is_pending(), poll_once(&mut asked).is_pending()));
        assert!(matches!(begun, Ok((true, true))));
        assert_eq!(sent.try_send().map_err(|error| error.to_string()), Ok(()));
        assert_eq!(asked.try_send().unwrap().await.unwrap().as_bytes(), b"asked at last");
        assert_eq!(notes.recv().await.unwrap().text(), "sent");
        handle.advance();
        assert!(poll_once(&mut Box::pin(notes.recv())).is_pending(), "nothing else was sent");
    });
}

/// Whoever is the first of the line, and was not polled since, tries at once.
#[test]
fn a_sequential_send_whose_turn_has_come_is_tried() {
    run(1, Setup::new(), async |member| {
        let (note, mut notes) = register_stream(&*member.client, handle(&member), "note").unwrap();
        let mut first = note.send(Rank(0), "first").sequential();
        let mut second = note.send(Rank(0), "second").sequential();
        // The first has its turn, and cannot begin: somebody is at the context.
        let begun = handle(&member)
            .enter(|_| (poll_once(&mut first).is_pending(), poll_once(&mut second).is_pending()));
        assert!(matches!(begun, Ok((true, true))));
        first.await.unwrap();
        assert_eq!(second.try_send().map_err(|error| error.to_string()), Ok(()));
        for text in ["first", "second"] {
            assert_eq!(notes.recv().await.unwrap().text(), text);
        }
    });
}

/// Another thread is at the context when it is asked, and begins what cannot be asked as it leaves.
#[test]
fn what_another_thread_has_begun_tells_how_it_failed() {
    run(1, Setup::new(), async |member| {
        let handle = handle(&member);
        let (note, _notes) = register_stream(&*member.client, handle.clone(), "note").unwrap();
        let echo = register_inline(&*member.client, handle.clone(), "echo", |_, _| Ok(Buffer::copy(&[])));
        let echo = echo.unwrap();
        let unknown = SendError::UnknownRank { rank: Rank(7), size: 1 };
        for tried in [false, true] {
            let mut call = echo.call_bytes(Rank(7), "asked");
            let mut send = note.send(Rank(7), "sent");
            let (there, begun) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
            std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    // Whoever drives the context may be there.
                    let stays = || {
                        there.wait();
                        begun.wait();
                    };
                    while handle.enter(|_| stays()).is_err() {
                        std::thread::yield_now();
                    }
                });
                there.wait();
                assert!(poll_once(&mut call).is_pending() && poll_once(&mut send).is_pending());
                begun.wait();
                other.join().unwrap();
            });
            let payloads = if tried {
                let refused = |payload: Buffer, error| {
                    assert_eq!(error, unknown);
                    payload
                };
                let call = match call.try_send().map(drop) {
                    Err(TrySendError::Failed { error, payload }) => refused(payload, error),
                    other => panic!("{other:?}"),
                };
                match send.try_send() {
                    Err(TrySendError::Failed { error, payload }) => [call, refused(payload, error)],
                    other => panic!("{other:?}"),
                }
            } else {
                assert_eq!((&mut call).await.unwrap_err(), CallError::from(unknown.clone()));
                assert_eq!((&mut send).await.unwrap_err(), unknown);
                [call.into_payload().unwrap(), send.into_payload().unwrap()]
            };
            assert_eq!(payloads.map(Buffer::into_bytes), ["asked", "sent"].map(bytes::Bytes::from));
        }
    });
}

/// So is what a multicast has left to whoever is at the context.
#[test]
fn a_multicast_that_waits_for_the_context_is_given_up_and_not_sent() {
    run(2, Setup::new(), async |member| {
        let (note, mut notes) = register_stream(&*member.client, handle(&member), "note").unwrap();
        let world = member.collectives.world();
        world.barrier().await.unwrap();
        if member.rank == Rank(0) {
            let given_up = handle(&member).enter(|_| {
                let mut many = note.multicast([Rank(0), Rank(1)], "given up");
                poll_once(&mut many).is_pending()
            });
            assert!(matches!(given_up, Ok(true)));
            note.multicast([Rank(0), Rank(1)], "sent").await.unwrap();
        }
        assert_eq!(notes.recv().await.unwrap().text(), "sent");
        world.barrier().await.unwrap();
    });
}
