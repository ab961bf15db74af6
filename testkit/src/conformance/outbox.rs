//! Messages of a rank, sent one after the other as there is room.

use super::world::at;
use super::{Harness, World};
use crate::random::Random;
use bytes::Bytes;
use posthaste_core::engine::{Deposit, Given, Payload, SendArgs};
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
    /// The engine has the message at the front.
    waiting: Option<(Ticket, Deposit)>,
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
        if let Some((ticket, deposit)) = &self.waiting {
            let Some(outcome) = slots.take(*ticket) else { return false };
            let back = deposit.withdraw();
            self.waiting = None;
            match outcome {
                Ok(_) => {
                    assert!(back.is_none(), "what was sent was taken");
                    self.is_on_its_way();
                }
                Err(fault) => {
                    if let (Some(payload), Some(message)) = (back, self.queue.front()) {
                        assert_eq!(payload.bytes_of(), message.payload, "the payload comes back");
                    }
                    self.ended(world, fault.into());
                }
            }
            return true;
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
            let not_sent = |(error, payload): (SendError, Payload<'_>)| {
                assert_eq!(payload.bytes_of(), message.payload, "the payload comes back");
                error
            };
            let payload = match message.owned {
                true => Payload::Owned(Bytes::from(message.payload.clone())),
                false => Payload::Borrowed(&message.payload),
            };
            Ok(match scope.give(&args, payload).map_err(not_sent)? {
                Given::Done => (None, None),
                Given::Queued(ticket) => (Some(ticket), None),
                Given::Kept(ticket, deposit) => (None, Some((ticket, deposit))),
            })
        });
        match sent {
            Ok((_, Some(waiting))) => {
                self.waiting = Some(waiting);
                return false;
            }
            Ok((queued, None)) => self.queued.extend(queued),
            Err(error) => {
                self.ended(world, error);
                return true;
            }
        }
        self.is_on_its_way();
        true
    }

    fn is_on_its_way(&mut self) {
        self.queue.pop_front();
        if let Some(ticket) = self.cookie.take() {
            self.asked.push((self.sent, ticket));
        }
        self.sent += 1;
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
