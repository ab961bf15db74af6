//! Messages of a rank, sent one after the other as there is room.

use super::world::at;
use super::{Harness, World};
use crate::random::Random;
use bytes::Bytes;
use posthaste_core::engine::{Payload, SendArgs, Sent, Wait};
use posthaste_core::slot::Outcome;
use posthaste_core::{Endpoint, Fault, ProtocolId, Rank, SendError, Ticket};
use std::collections::{BTreeMap, VecDeque};

/// A message to be sent.
#[derive(Clone, Debug)]
pub struct Message {
    /// Where to.
    pub target: Endpoint,
    /// In which protocol.
    pub protocol: ProtocolId,
    /// Message info.
    pub info: Vec<u8>,
    /// The payload.
    pub payload: Vec<u8>,
    /// Hand the payload over instead of lending it.
    pub owned: bool,
    /// An answer is wanted.
    pub request: bool,
}

impl Message {
    /// A message without info.
    #[must_use]
    pub fn new(target: Rank, protocol: ProtocolId, payload: impl Into<Vec<u8>>) -> Self {
        let (target, payload) = (at(target), payload.into());
        Self { target, protocol, info: Vec::new(), payload, owned: false, request: false }
    }

    /// The same as a request.
    #[must_use]
    pub fn request(mut self) -> Self {
        self.request = true;
        self
    }

    /// With that info.
    #[must_use]
    pub fn info(mut self, info: impl Into<Vec<u8>>) -> Self {
        self.info = info.into();
        self
    }

    /// With bytes of its own: they follow from the sender, the number and the lengths.
    #[must_use]
    pub fn filled(
        from: Endpoint,
        target: Endpoint,
        protocol: ProtocolId,
        number: usize,
        info: usize,
        len: usize,
    ) -> Self {
        let name = (u64::from(from.rank.0) << 48)
            ^ (u64::from(from.context.0) << 40)
            ^ (u64::from(target.rank.0) << 32)
            ^ (u64::from(target.context.0) << 24)
            ^ number as u64;
        let mut random = Random::new(name);
        let (info, payload) = (random.bytes(info), random.bytes(len));
        Self { target, protocol, info, payload, owned: number.is_multiple_of(2), request: false }
    }
}

/// Sends messages one after the other, as one task does that awaits each.
#[derive(Debug)]
pub struct Outbox {
    /// Who sends.
    pub from: Endpoint,
    /// What is not on its way yet.
    pub queue: VecDeque<Message>,
    /// Sends and requests that failed.
    pub failed: Vec<SendError>,
    /// How the requests ended, by their number in this outbox.
    pub answers: BTreeMap<usize, Outcome>,
    waiting: Option<(Ticket, Wait)>,
    cookie: Option<Ticket>,
    queued: Vec<Ticket>,
    asked: Vec<(usize, Ticket)>,
    sent: usize,
}

impl Outbox {
    /// An outbox of messages.
    #[must_use]
    pub fn new(from: Endpoint, messages: impl IntoIterator<Item = Message>) -> Self {
        Self {
            from,
            queue: messages.into_iter().collect(),
            failed: Vec::new(),
            answers: BTreeMap::new(),
            waiting: None,
            cookie: None,
            queued: Vec::new(),
            asked: Vec::new(),
            sent: 0,
        }
    }

    /// Whether everything is on its way and every request has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.queue.is_empty() && self.queued.is_empty() && self.asked.is_empty()
    }

    /// Whether the sender has to wait at the moment.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Messages that are in the injection FIFO.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queued.len()
    }

    /// Goes on as far as possible.
    pub fn pump<H: Harness>(&mut self, world: &World<H>) {
        let slots = world.handle(self.from).slots();
        let failed = &mut self.failed;
        self.queued.retain(|ticket| match slots.take(*ticket) {
            Some(Err(fault)) => {
                failed.push(fault.into());
                false
            }
            outcome => outcome.is_none(),
        });
        let answers = &mut self.answers;
        self.asked.retain(|(number, ticket)| match slots.take(*ticket) {
            Some(outcome) => {
                answers.insert(*number, outcome);
                false
            }
            None => true,
        });
        while self.send_next(world) {}
    }

    fn send_next<H: Harness>(&mut self, world: &World<H>) -> bool {
        let slots = world.handle(self.from).slots();
        let mut wait = Wait::Await;
        if let Some((ticket, granted)) = self.waiting {
            match slots.take(ticket) {
                None => return false,
                Some(Ok(_)) => wait = granted,
                Some(Err(fault)) => {
                    self.waiting = None;
                    self.ended(world, fault.into());
                    return true;
                }
            }
            self.waiting = None;
        }
        let Some(message) = self.queue.front() else { return false };
        let cookie = &mut self.cookie;
        let sent = world.enter(self.from, |scope| {
            if message.request && cookie.is_none() {
                let ticket = scope.operation(Some(message.target.rank))?;
                scope.note_request(ticket, message.protocol, message.payload.len());
                *cookie = Some(ticket);
            }
            let args = SendArgs {
                target: message.target,
                protocol: message.protocol,
                cookie: cookie.map_or(0, Ticket::to_word),
                info: &message.info,
                relaxed: false,
            };
            let payload = if message.owned {
                Payload::Owned(Bytes::from(message.payload.clone()))
            } else {
                Payload::Borrowed(&message.payload)
            };
            match scope.send(&args, payload, wait) {
                Ok(Sent::Done) => Ok(None),
                Ok(Sent::Queued(ticket)) => Ok(Some((ticket, None))),
                Ok(Sent::Later(ticket, wait, payload)) => {
                    assert_eq!(payload.len(), message.payload.len(), "the payload comes back");
                    Ok(Some((ticket, Some(wait))))
                }
                Ok(Sent::Full(_)) => panic!("who awaits is not told Full"),
                Err((error, payload)) => {
                    assert_eq!(payload.bytes_of(), message.payload, "the payload comes back");
                    Err(error)
                }
            }
        });
        match sent {
            Ok(Some((ticket, Some(wait)))) => {
                self.waiting = Some((ticket, wait));
                return false;
            }
            Ok(Some((ticket, None))) => self.queued.push(ticket),
            Ok(None) => {}
            Err(error) => {
                self.ended(world, error);
                return true;
            }
        }
        self.queue.pop_front();
        if let Some(ticket) = self.cookie.take() {
            self.asked.push((self.sent, ticket));
        }
        self.sent += 1;
        true
    }

    /// The message at the front failed.
    fn ended<H: Harness>(&mut self, world: &World<H>, error: SendError) {
        self.queue.pop_front();
        if let Some(ticket) = self.cookie.take() {
            // It may have ended already, with its peer.
            world.enter(self.from, |scope| scope.complete(ticket, Err(Fault::Shutdown)));
            world.handle(self.from).slots().detach(ticket);
        }
        self.sent += 1;
        self.failed.push(error);
    }
}
