//! Messages that go through pages: whose turn a page is, and when it comes back.

use super::super::COPY_FLAG;
use super::{Payload, Tx, TxLane};
use crate::lane::{Header, KIND_PAGE};
use crate::pages::{Page, Taken};
use posthaste_core::memory::Words;
use posthaste_core::sync::lock;
use posthaste_core::{Fault, ProtocolId};

/// A page that holds the payload of a multicast; its maker is one of its users until the multicast ends.
pub(super) struct SharedPage {
    address: usize,
    len: usize,
    page: Page,
}

/// Everything of a message in a page but its payload.
#[derive(Clone, Copy)]
pub(super) struct PageHead<'a> {
    pub protocol: ProtocolId,
    pub cookie: u64,
    pub len: u64,
    pub info: &'a [u8],
}

impl Tx {
    /// A payload that goes into a page of this side's pool (or is there already, as a loan), named by a record.
    #[inline(never)]
    pub(super) fn send_page(
        &mut self,
        index: usize,
        head: PageHead<'_>,
        source: Payload<'_>,
    ) -> Result<bool, Fault> {
        self.lane(index)?;
        self.settle(index);
        let header = Header {
            kind: KIND_PAGE,
            info_len: head.info.len() as u8,
            protocol: head.protocol.0,
            len: head.len as u32,
            cookie: head.cookie != 0,
        };
        // Before the payload is copied.
        let may = |lane: &mut Box<TxLane>| !lane.grants.is_far_ahead() && lane.producer.has_room(header);
        if !self.lanes[index].as_mut().is_some_and(may) {
            self.block(index);
            return Ok(false);
        }
        let there = self.page_of(source);
        let (page, lent) = match (source, there) {
            (Payload::Loan(key, _), _) => (Page::from_word(key), true),
            (_, Some(page)) => {
                self.pool.share(page);
                (page, false)
            }
            _ => match self.take_page(head.len)? {
                Some(page) => (page, false),
                None => {
                    self.block(index);
                    return Ok(false);
                }
            },
        };
        // After the page, which may have to be looked for: that frees numbers, too.
        let Some((number, life)) = self.next_grant(index) else {
            if !lent {
                self.pool.give_back(page);
            }
            self.block(index);
            return Ok(false);
        };
        let memory = self.memory.slice(page.offset, head.len);
        match (source, memory) {
            _ if there.is_some() => {}
            (Payload::Private(bytes), Some(memory)) => {
                memory.write(bytes);
                if self.multicast {
                    self.keep_for_others(bytes, page);
                }
            }
            (Payload::Shared(slice), Some(memory)) => memory.copy_from(slice),
            _ => {}
        }
        posthaste_core::failpoint!("grant.written");
        let scarce = self.pool.is_scarce();
        let Some(lane) = &mut self.lanes[index] else { return Ok(false) };
        let copy = if scarce || lane.grants.are_kept() { COPY_FLAG } else { 0 };
        let sent = lane.producer.push(header, head.cookie, head.info, |ring, at| {
            ring.store(at, page.offset, posthaste_core::sync::Ordering::Relaxed);
            let word = life | (number as u64) << 40 | copy;
            ring.store(at + 1, word, posthaste_core::sync::Ordering::Relaxed);
        });
        if sent {
            lane.grants.grant(number, life, page, lane.producer.tail());
            posthaste_core::failpoint!("grant.sent");
            if lane.producer.reader_wants_notice(self.fence) {
                self.announce_to(index);
            }
        } else {
            lane.blocked = true;
            if !lent {
                self.pool.give_back(page);
            }
        }
        Ok(sent)
    }

    /// The page that a multicast has put this payload into.
    #[inline]
    pub(super) fn page_of(&self, source: Payload<'_>) -> Option<Page> {
        let (Some(shared), Payload::Private(bytes)) = (&self.shared, source) else { return None };
        let same = (shared.address, shared.len) == (bytes.as_ptr().addr(), bytes.len());
        same.then_some(shared.page)
    }

    /// The page serves the others of the multicast, too.
    pub(super) fn keep_for_others(&mut self, bytes: &[u8], page: Page) {
        self.forget_shared();
        self.pool.share(page);
        self.shared = Some(SharedPage { address: bytes.as_ptr().addr(), len: bytes.len(), page });
    }

    pub(super) fn forget_shared(&mut self) {
        if let Some(SharedPage { page, .. }) = self.shared.take() {
            self.pool.give_back(page);
        }
    }

    /// A free number and life for a grant; `None` if all are in use.
    pub(super) fn next_grant(&mut self, index: usize) -> Option<(usize, u64)> {
        let next = self.lanes[index].as_ref()?.grants.next();
        if next.is_none() {
            self.sweep(index);
            return self.lanes[index].as_ref()?.grants.next();
        }
        next
    }

    /// Looks how far a reader has got, if that is worth while.
    pub(super) fn settle(&mut self, index: usize) {
        let Tx { lanes, pool, .. } = self;
        if let Some(lane) = &mut lanes[index]
            && lane.grants.worth_a_look()
        {
            let TxLane { producer, grants, .. } = &mut **lane;
            let head = producer.consumed();
            grants.settle(head, |number| producer.returned(number), |page| pool.give_back(page));
        }
    }

    /// A page for `len` bytes; `None`: all are in use.
    pub(super) fn take_page(&mut self, len: u64) -> Result<Option<Page>, Fault> {
        // Rather than touch ever more memory, look what has come back.
        if self.pool.is_large() && !self.pool.has_warm(len) {
            self.sweep_all();
        }
        let mut taken = self.pool.take(len);
        if taken.is_none() {
            self.sweep_all();
            let returned = std::mem::take(&mut *lock(&self.home.returned_loans));
            for word in returned {
                self.pool.give_back(Page::from_word(word));
            }
            taken = self.pool.take(len);
        }
        match taken {
            None => Ok(None),
            Some(Taken::Warm(page)) => Ok(Some(page)),
            Some(Taken::Fresh(page)) => {
                match self.home.link.arena.commit_fresh(self.pool_at + page.offset, page.len()) {
                    Ok(()) => Ok(Some(page)),
                    Err(error) => {
                        self.pool.never_mind(page);
                        tracing::warn!(%error, "no memory for a page");
                        Err(Fault::OutOfMemory("for a page; see the log"))
                    }
                }
            }
        }
    }

    #[cold]
    pub(super) fn sweep_all(&mut self) {
        for index in 0..self.lanes.len() {
            self.sweep(index);
        }
    }

    /// Takes back all the pages that the reader of a lane has returned.
    pub(super) fn sweep(&mut self, index: usize) -> bool {
        let Tx { lanes, pool, .. } = self;
        let Some(lane) = &mut lanes[index] else { return false };
        if !lane.grants.any() {
            return false;
        }
        let TxLane { producer, grants, .. } = &mut **lane;
        let head = producer.consumed();
        let settled = grants.settle(head, |number| producer.returned(number), |page| pool.give_back(page));
        grants.sweep(|number| producer.returned(number), |page| pool.give_back(page)) || settled
    }
}
