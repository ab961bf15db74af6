//! Messages that go through pages: whose turn a page is, and when it comes back.

use super::super::COPY_FLAG;
use super::{Payload, Tx, TxLane};
use crate::grants::Slot;
use crate::lane::{Header, KIND_PAGE};
use crate::link::grant_word;
use crate::pages::{Page, PagePool, Taken};
use posthaste_core::memory::{SharedSlice, Words};
use posthaste_core::{Fault, ProtocolId};
use std::sync::atomic::Ordering;

/// One part in so many of the pages that are out: as much is to come back for a look at all of them.
const WORTH_A_SWEEP: u64 = 16;

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
    /// The most frequent message in a page: these bytes, without info. False, and nothing was done: it is not that simple,
    /// and [`send_page`](Self::send_page) knows why.
    #[inline]
    pub(super) fn page_at_once(
        &mut self,
        index: usize,
        protocol: ProtocolId,
        cookie: u64,
        bytes: &[u8],
    ) -> bool {
        let Tx { lanes, pool, memory, fence, multicast, returns, .. } = self;
        let Some(Some(lane)) = lanes.get_mut(index) else { return false };
        if lane.dead || *multicast {
            return false;
        }
        lane.look(pool, returns);
        let (len, has_cookie) = (bytes.len() as u64, cookie != 0);
        let header = page_header(protocol, len, 0, has_cookie);
        if lane.grants.is_far_ahead() || !lane.producer.has_room(header) {
            return false;
        }
        let Some(slot) = lane.grants.take(len, pool) else { return false };
        let memory = memory.slice(slot.page().offset, len).map(|memory| lane.write(memory, bytes));
        posthaste_core::failpoint!("grant.page.written");
        let copy = must_copy(lane, pool);
        // A page lies in the pool, and there was room a moment ago.
        if memory.is_none() || !lane.name(header, cookie, &[], slot, copy) {
            lane.grants.put_back(slot, pool);
            return false;
        }
        posthaste_core::failpoint!("grant.page.sent");
        if lane.producer.reader_wants_notice(*fence) {
            self.announce_to(index);
        }
        true
    }

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
        let header = page_header(head.protocol, head.len, head.info.len(), head.cookie != 0);
        // Before the payload is copied.
        let may = |lane: &mut Box<TxLane>| !lane.grants.is_far_ahead() && lane.producer.has_room(header);
        if !self.lanes[index].as_mut().is_some_and(may) || self.is_beyond_its_share(index, head.len) {
            self.block(index);
            return Ok(false);
        }
        let there = self.page_of(source);
        let lent = matches!(source, Payload::Loan(..));
        let slot = match (source, there) {
            (Payload::Loan(key, _), _) => self.slot_for(index, Page::from_word(key)),
            (_, Some(page)) => self.slot_for(index, page).inspect(|_| self.pool.share(page)),
            _ => self.slot(index, head.len)?,
        };
        let Some(mut slot) = slot else {
            self.block(index);
            return Ok(false);
        };
        let memory = self.memory.slice(slot.page().offset, head.len);
        match (source, memory) {
            _ if there.is_some() => {}
            (Payload::Private(bytes), Some(memory)) => {
                match &self.lanes[index] {
                    Some(lane) if !self.multicast => lane.write(memory, bytes),
                    _ => memory.write_to_reader(bytes),
                }
                if self.multicast {
                    self.keep_for_others(bytes, slot.page());
                    slot.sole = false;
                }
            }
            (Payload::Shared(slice), Some(memory)) => memory.copy_from(slice),
            _ => {}
        }
        posthaste_core::failpoint!("grant.page.written");
        let Tx { lanes, pool, .. } = self;
        let Some(lane) = &mut lanes[index] else { return Ok(false) };
        let copy = must_copy(lane, pool);
        let sent = lane.name(header, head.cookie, head.info, slot, copy);
        if sent {
            posthaste_core::failpoint!("grant.page.sent");
            if lane.producer.reader_wants_notice(self.fence) {
                self.announce_to(index);
            }
        } else {
            match lent {
                true => lane.grants.number_unused(slot.number),
                false => lane.grants.put_back(slot, pool),
            }
            self.block(index);
        }
        Ok(sent)
    }

    /// Whether a reader has enough of the pages while they are scarce: who is slow must not have all of them.
    #[inline]
    fn is_beyond_its_share(&mut self, index: usize, len: u64) -> bool {
        self.pool.is_scarce() && self.is_beyond_its_share_of_few(index, len)
    }

    #[cold]
    fn is_beyond_its_share_of_few(&mut self, index: usize, len: u64) -> bool {
        let Tx { lanes, pool, returns, .. } = self;
        // Half of them are for all that there may be.
        let share = pool.size() / (2 * lanes.len() as u64);
        let Some(lane) = &mut lanes[index] else { return false };
        if lane.grants.is_beyond(share, len) {
            *returns += u64::from(lane.settle(pool));
        }
        lane.grants.is_beyond(share, len)
    }

    /// A number and a page for `len` bytes; `None`: all are in use.
    pub(super) fn slot(&mut self, index: usize, len: u64) -> Result<Option<Slot>, Fault> {
        let Tx { lanes, pool, .. } = self;
        if let Some(slot) = lanes[index].as_mut().and_then(|lane| lane.grants.take(len, pool)) {
            return Ok(Some(slot));
        }
        let Some(page) = self.take_page(len)? else { return Ok(None) };
        // After the page, which may have to be looked for: that frees numbers, too.
        let number = self.number(index);
        if number.is_none() {
            self.pool.give_back(page);
        }
        Ok(number.map(|number| Slot::new(number, page, true)))
    }

    /// A number for a page that others use as well, or have another way home for.
    fn slot_for(&mut self, index: usize, page: Page) -> Option<Slot> {
        self.number(index).map(|number| Slot::new(number, page, false))
    }

    /// A free number for a grant; `None` if all are in use.
    fn number(&mut self, index: usize) -> Option<u16> {
        for looked in [false, true] {
            if looked {
                self.sweep(index);
            }
            let Tx { lanes, pool, .. } = self;
            let number = lanes[index].as_mut()?.grants.number(pool);
            if number.is_some() {
                return number;
            }
        }
        None
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
            self.returns += 1;
        }
    }

    /// Looks how far a reader has got, if that is worth while.
    #[inline]
    pub(super) fn settle(&mut self, index: usize) {
        let Tx { lanes, pool, returns, .. } = self;
        if let Some(lane) = &mut lanes[index] {
            lane.look(pool, returns);
        }
    }

    /// A page for `len` bytes; `None`: all are in use.
    pub(super) fn take_page(&mut self, len: u64) -> Result<Option<Page>, Fault> {
        self.take_back_loans();
        if self.pool.any_rest() && !self.pool.has_warm(len) {
            self.end_rest();
        }
        // Rather than touch ever more memory, look what has come back: again only when that may be a good part of what is out,
        // as each page that is costs a look.
        if self.pool.is_large() && !self.pool.has_warm(len) && self.pool.touched() >= self.sweep_at {
            let out = self.pool.in_use();
            self.sweep_all();
            let worth = out / WORTH_A_SWEEP;
            let came_back = out - self.pool.in_use();
            self.sweep_at = if came_back >= worth { 0 } else { self.pool.touched() + worth };
        }
        let mut taken = self.pool.take(len);
        if taken.is_none() {
            self.sweep_all();
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
                        // What others have returned does not have to be committed.
                        self.sweep_all();
                        if let Some(page) = self.pool.take_warm(len) {
                            return Ok(Some(page));
                        }
                        tracing::warn!(%error, "no memory for a page");
                        Err(Fault::OutOfMemory(error.limit()))
                    }
                }
            }
        }
    }

    /// Loans that were dropped unsent.
    #[inline]
    fn take_back_loans(&mut self) {
        if self.home.any_loans_returned.load(Ordering::Relaxed) {
            self.take_back_all_loans();
        }
    }

    /// The same, of whatever thread; whether there were any.
    #[cold]
    pub(super) fn take_back_all_loans(&mut self) -> bool {
        let returned = self.home.returned_loans();
        returned.iter().for_each(|word| self.pool.give_back(Page::from_word(*word)));
        self.returns += returned.len() as u64;
        !returned.is_empty()
    }

    /// What rests with the lanes is for all again.
    #[cold]
    fn end_rest(&mut self) {
        let Tx { lanes, pool, .. } = self;
        lanes.iter_mut().flatten().for_each(|lane| lane.grants.end_rest(pool));
    }

    #[cold]
    pub(super) fn sweep_all(&mut self) {
        for index in 0..self.lanes.len() {
            self.sweep(index);
        }
    }

    /// Takes back all the pages that the reader of a lane has returned.
    pub(super) fn sweep(&mut self, index: usize) -> bool {
        let Tx { lanes, pool, returns, .. } = self;
        let Some(lane) = &mut lanes[index] else { return false };
        if !lane.grants.any() {
            return false;
        }
        let settled = lane.settle(pool);
        let TxLane { producer, grants, .. } = &mut **lane;
        let any = grants.sweep(|number| producer.returned(number), pool) || settled;
        *returns += u64::from(any);
        any
    }
}

impl TxLane {
    /// Looks how far the reader has got, if that is worth while.
    #[inline]
    fn look(&mut self, pool: &mut PagePool, returns: &mut u64) {
        if self.grants.worth_a_look() {
            *returns += u64::from(self.settle(pool));
        }
    }

    /// Writes a payload where the reader is going to read it.
    #[inline]
    fn write(&self, memory: SharedSlice, bytes: &[u8]) {
        if self.nearness.wants_loop(bytes.len()) {
            memory.write_near(bytes)
        } else {
            memory.write_to_reader(bytes)
        }
    }

    /// Looks how far the reader has got. True if anything has come of it.
    #[inline(never)]
    fn settle(&mut self, pool: &mut PagePool) -> bool {
        let TxLane { producer, nearness, .. } = self;
        // A line that is here already tells nothing of who wrote it.
        let head = match producer.take_glanced() {
            true => producer.consumed(),
            false => nearness.look(producer.known(), || producer.consumed()),
        };
        self.grants.settle(head, |number| self.producer.returned(number), pool)
    }

    /// Writes the record that names a page, and grants it; false: no room.
    #[inline(always)]
    fn name(&mut self, header: Header, cookie: u64, info: &[u8], slot: Slot, copy: bool) -> bool {
        let word = grant_word(usize::from(slot.number), self.grants.next_life());
        let word = word | if copy { COPY_FLAG } else { 0 };
        let sent = self.producer.push(header, cookie, info, |ring, at| {
            ring.store(at, slot.page().offset, posthaste_core::sync::Ordering::Relaxed);
            ring.store(at + 1, word, posthaste_core::sync::Ordering::Relaxed);
        });
        if sent {
            self.grants.grant(slot, self.producer.tail());
        }
        sent
    }
}

/// Whether the reader should copy what it is sent at once, and give the page back.
#[inline]
fn must_copy(lane: &TxLane, pool: &PagePool) -> bool {
    pool.is_scarce() || lane.grants.are_kept()
}

#[inline]
fn page_header(protocol: ProtocolId, len: u64, info_len: usize, cookie: bool) -> Header {
    Header { kind: KIND_PAGE, info_len: info_len as u8, protocol: protocol.0, len: len as u32, cookie }
}
