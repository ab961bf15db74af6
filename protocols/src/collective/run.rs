//! One operation under way on one rank: a state machine without I/O.
//!
//! The chunks of an operation (*slices*) run through the plan independently of each other: that is the pipelining. Within
//! a slice a step is done as soon as those are done that it waits for. What arrives before its turn is kept; what is
//! combined is combined in the order of the plan, so that the result does not depend on timing.

use super::execution::{Executor, Step as Message, Turn};
use super::foreign::{Foreign, Retire};
use super::group_state::Notice;
use super::layout::{Layout, input_is_own_block};
use super::part::{Kept, Part, combine, store};
use super::plan::{Plan, Step, Task};
use super::reduce::Combiner;
use super::schedule::{Action, Kind};
use super::stage::{Lent, Reference};
use bytes::Bytes;
use posthaste_core::device::Body;
use posthaste_core::memory::Source;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// The message that a step and a slice are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct At {
    pub slice: u32,
    pub step: u16,
}

/// What the receiver of a long message clears: its colour and step, in all slices of that.
pub(super) type Cleared = (u32, u16);

/// A message to be sent.
#[derive(Debug)]
pub(crate) struct Outgoing<'r> {
    pub to: usize,
    pub phase: u16,
    pub slice: u32,
    /// It goes when its receiver has cleared it.
    pub long: bool,
    pub payload: &'r [u8],
    /// It stays in this rank's memory, here, and goes as soon as it is ready; the payload is empty.
    pub lent: Option<Reference>,
}

/// What became of a message to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It is on its way, or kept by whoever sends it.
    Done,
    /// Not now: [`Run::resume`] tries again.
    Later,
}

/// A message that does not belong into the operation as it was called here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Misfit;

/// What goes into an operation.
#[derive(Debug)]
pub(crate) struct Input {
    pub bytes: Bytes,
    /// How what is sent lies, if otherwise than what is received.
    pub outgoing: Option<Layout>,
    /// The others read it where it lies, and there are no bytes but those of a broadcast, which are laid down chunk by chunk. The
    /// schedule is one by which whoever gives something sends it to everybody directly.
    pub lent: Option<Lent>,
}

/// An operation under way.
#[derive(Debug)]
pub(crate) struct Run {
    pub(super) plan: Arc<Plan>,
    pub(super) layout: Layout,
    pub(super) input: Input,
    pub(super) work: Vec<u8>,
    combiner: Option<Combiner>,
    /// Steps per slice in `left`.
    stride: usize,
    /// By slice and step: how many steps have to be done before it; `DONE` when it is done itself.
    left: Vec<u16>,
    /// Messages that are not done.
    remaining: usize,
    pub(super) ready: VecDeque<At>,
    /// Sends that wait for room.
    parked: Vec<At>,
    /// Long sends whose receiver is not known to be there, and those of which it is.
    pub(super) unclear: BTreeMap<Cleared, Vec<At>>,
    pub(super) clear: HashSet<Cleared>,
    /// What arrived before its turn.
    early: HashMap<At, Kept>,
    /// Receipts whose turn has come, of what arrived before it.
    due: VecDeque<At>,
    /// Of an operation that lends: by slice and block, what is put together in the end.
    pub(super) parts: Vec<Option<Kept>>,
    /// By slice, whether what is laid down late is in the area.
    pub(super) shown: Vec<bool>,
    /// What is to be lent waits for room.
    pub(super) awaits_room: bool,
    /// Who says what is done when, if not the dependencies alone.
    executor: Option<Box<Foreign>>,
}

/// In `left`: the step is done, or is none of this slice.
const DONE: u16 = u16::MAX;
/// The same where an executor decides: its turn has not come, or is there.
const WAITING: u16 = 1;
const GIVEN: u16 = 0;

impl Run {
    /// Starts the operation; its first sends are ready. `None`: there is no memory for what it receives.
    pub fn new(plan: Arc<Plan>, layout: Layout, input: Input, combiner: Option<Combiner>) -> Option<Run> {
        Self::by(plan, layout, input, combiner, None)
    }

    /// The same, as an executor says.
    pub fn by(
        plan: Arc<Plan>,
        layout: Layout,
        input: Input,
        combiner: Option<Combiner>,
        executor: Option<(Arc<dyn Executor>, Retire)>,
    ) -> Option<Run> {
        let mut run = Run {
            stride: plan.colours.iter().map(|colour| colour.steps.len()).max().unwrap_or(0),
            plan,
            layout,
            input,
            work: Vec::new(),
            combiner,
            left: Vec::new(),
            remaining: 0,
            ready: VecDeque::new(),
            parked: Vec::new(),
            unclear: BTreeMap::new(),
            clear: HashSet::new(),
            early: HashMap::new(),
            due: VecDeque::new(),
            parts: Vec::new(),
            shown: Vec::new(),
            awaits_room: false,
            executor: None,
        };
        run.fill()?;
        run.arm();
        if let Some((executor, retire)) = executor {
            run.hand_over(executor, retire);
        }
        Some(run)
    }

    /// Lays out what is worked on.
    fn fill(&mut self) -> Option<()> {
        let Run { plan, layout, input, work, .. } = self;
        if let Some(lent) = &mut input.lent {
            let own = lent.exchange.as_mut().map(|exchange| std::mem::take(&mut exchange.own));
            *work = own.unwrap_or_default();
            return Some(());
        }
        let total = layout.total(plan);
        if total == 0 || (plan.sends_input && is_input_the_result(plan)) {
            return Some(());
        }
        let own = plan.rank;
        match plan.kind {
            // Not a copy: nobody else has the bytes.
            Kind::Reduce | Kind::AllReduce | Kind::ReduceScatter if !plan.sends_input => {
                *work = Vec::from(std::mem::take(&mut input.bytes));
            }
            Kind::Reduce | Kind::AllReduce | Kind::ReduceScatter => work.extend_from_slice(&input.bytes),
            Kind::Scatter if plan.rank == plan.root => {}
            Kind::Gather if plan.sends_input && plan.rank != plan.root => {}
            _ => {
                work.try_reserve_exact(total).ok()?;
                let source = match (plan.kind, &input.outgoing) {
                    (Kind::Gather | Kind::AllGather, _) => Some(0..input.bytes.len()),
                    (Kind::AllToAll, Some(outgoing)) => outgoing.place(plan, own, true),
                    (Kind::AllToAll, None) => layout.place(plan, own, true),
                    _ => None,
                };
                if let Some(source) = source.and_then(|range| input.bytes.get(range))
                    && let Some(target) = layout.place(plan, own, false)
                    && source.len() == target.len()
                {
                    store(Source::Private(source), 0, target, work);
                }
            }
        }
        Some(())
    }

    /// Counts what each step of each slice waits for.
    fn arm(&mut self) {
        let plan = self.plan.clone();
        let colours = plan.colours.len();
        let slices = self.slices();
        self.left.resize(slices * self.stride, DONE);
        if self.lends() {
            self.parts.resize(slices * plan.blocks, None);
            self.shown.resize(slices, false);
        }
        let cut = slices > 1;
        for slice in 0..slices {
            let steps = &plan.colours[slice % colours].steps;
            let first = slice * self.stride;
            for (left, step) in self.left[first..].iter_mut().zip(steps) {
                *left = step.waits;
            }
            self.remaining += steps.len();
            if cut {
                for (number, step) in steps.iter().enumerate() {
                    if slice >= self.layout_of(step).slices_of(&plan, &step.blocks) {
                        self.left[first + number] = DONE;
                        self.remaining -= 1;
                        for follower in &step.followers {
                            let left = &mut self.left[first + usize::from(*follower)];
                            *left = left.saturating_sub(u16::from(*left != DONE));
                        }
                    }
                }
            }
            for (number, step) in steps.iter().enumerate() {
                if step.task == Task::Send && self.left[first + number] == 0 {
                    self.ready.push_back(At { slice: slice as u32, step: number as u16 });
                }
            }
        }
    }

    pub(super) fn slices(&self) -> usize {
        self.outgoing().slices().max(self.layout.slices())
    }

    /// Has an executor decide from here on.
    fn hand_over(&mut self, executor: Arc<dyn Executor>, retire: Retire) {
        self.ready.clear();
        self.left.iter_mut().filter(|left| **left != DONE).for_each(|left| *left = WAITING);
        let turn = |index: usize| {
            let at = self.at(index);
            self.turn_of(at, self.step(at))
        };
        let indices = 0..self.left.len();
        let turns = indices.filter(|index| self.left[*index] != DONE).map(turn).collect();
        self.executor = Some(Box::new(Foreign::new(executor, turns, retire)));
    }

    /// How an executor names what a step of a slice is.
    fn turn_of(&self, at: At, step: &Step) -> Turn {
        let message = Message {
            peer: step.peer as usize,
            route: self.colour(at.slice),
            phase: step.phase.into(),
            slice: at.slice as usize,
        };
        if step.task == Task::Send { Turn::Send(message) } else { Turn::Take(message) }
    }

    /// What an executor names so.
    fn at_turn(&self, turn: Turn) -> Option<At> {
        let Message { peer, route, phase, slice } = turn.step();
        let colour = self.plan.colours.get(route).filter(|_| slice % self.plan.colours.len() == route)?;
        let (phase, peer) = (u16::try_from(phase).ok()?, u32::try_from(peer).ok()?);
        let step = match turn {
            Turn::Send(_) => colour.send(phase, peer)?,
            Turn::Take(_) => colour.receipt(phase, peer)?,
        };
        let index = slice.checked_mul(self.stride)?.checked_add(step.into())?;
        (*self.left.get(index)? == WAITING).then_some(At { slice: u32::try_from(slice).ok()?, step })
    }

    /// Whether an executor is to be [consulted](Self::consult).
    #[inline]
    pub fn has_news(&self) -> bool {
        self.executor.as_ref().is_some_and(|executor| executor.has_news())
    }

    /// Asks the executor, which is code of the user's, what is to be done now.
    #[cold]
    pub fn consult(&mut self) {
        let Some(mut executor) = self.executor.take() else { return };
        executor.hear(&self.plan.program);
        while let Some(turn) = executor.next() {
            let here = |at: &At| matches!(turn, Turn::Send(_)) || self.early.contains_key(at);
            let Some(at) = self.at_turn(turn).filter(here) else {
                executor.fail(&format!("it gave {turn:?}, which cannot be done now"));
                break;
            };
            *self.left(at) = GIVEN;
            match turn {
                Turn::Send(_) => self.ready.push_back(at),
                Turn::Take(_) => self.due.push_back(at),
            }
        }
        self.executor = Some(executor);
    }

    /// Whether the executor has failed.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.executor.as_ref().is_some_and(|executor| executor.has_failed())
    }

    fn outgoing(&self) -> &Layout {
        self.input.outgoing.as_ref().unwrap_or(&self.layout)
    }

    fn layout_of(&self, step: &Step) -> &Layout {
        if step.task == Task::Send { self.outgoing() } else { &self.layout }
    }

    #[inline]
    fn colour(&self, slice: u32) -> usize {
        slice as usize % self.plan.colours.len()
    }

    /// Which step of which slice has that place in `left`.
    fn at(&self, index: usize) -> At {
        let stride = self.stride.max(1);
        At { slice: (index / stride) as u32, step: (index % stride) as u16 }
    }

    #[inline]
    fn step(&self, at: At) -> &Step {
        &self.plan.colours[self.colour(at.slice)].steps[usize::from(at.step)]
    }

    #[inline]
    fn left(&mut self, at: At) -> &mut u16 {
        &mut self.left[at.slice as usize * self.stride + usize::from(at.step)]
    }

    /// Whether everything is sent and received.
    #[inline]
    pub fn is_done(&self) -> bool {
        self.remaining == 0
    }

    /// Whether code of the user's combines.
    pub fn calls_user(&self) -> bool {
        self.combiner.as_ref().is_some_and(Combiner::is_users)
    }

    /// The ranks to which long messages go.
    pub fn long_sends(&self) -> Vec<usize> {
        let steps = self.plan.colours.iter().flat_map(|colour| &colour.steps);
        let long = |step: &&Step| step.task == Task::Send && self.outgoing().is_long(&self.plan, step);
        each_once(steps.filter(long).map(|step| step.peer as usize))
    }

    /// The long messages that this rank is now ready to receive, and whose they are.
    pub fn long_receipts(&self) -> impl Iterator<Item = (usize, Notice)> + '_ {
        let colours = self.plan.colours.iter().enumerate();
        colours.flat_map(move |(colour, steps)| {
            steps.steps.iter().filter_map(move |step| {
                let long = step.task != Task::Send
                    && self.layout.is_long(&self.plan, step)
                    && colour < self.layout.slices_of(&self.plan, &step.blocks);
                let clear = || {
                    let len = self.layout.bytes_of(&self.plan, &step.blocks) as u64;
                    Notice::Clear { phase: step.phase, colour: colour as u32, len }
                };
                long.then(|| (step.peer as usize, clear()))
            })
        })
    }

    /// The receiver of a long message is there, and awaits so many bytes.
    pub fn cleared(&mut self, peer: usize, phase: u16, colour: u32, len: u64) -> Result<(), Misfit> {
        let steps = &self.plan.colours.get(colour as usize).ok_or(Misfit)?.steps;
        let is_it =
            |step: &Step| step.task == Task::Send && step.peer as usize == peer && step.phase == phase;
        let step = steps.iter().position(is_it).ok_or(Misfit)?;
        if self.outgoing().bytes_of(&self.plan, &steps[step].blocks) as u64 != len {
            return Err(Misfit);
        }
        let cleared = (colour, step as u16);
        // Who is asked says so once more.
        if self.clear.insert(cleared) && !self.awaits_room {
            self.ready.extend(self.unclear.remove(&cleared).into_iter().flatten());
        }
        Ok(())
    }

    /// Whether the receiver of a message is there.
    pub(super) fn is_clear(&self, at: At) -> bool {
        self.clear.contains(&self.clearance(at))
    }

    /// What its receiver clears it by.
    fn clearance(&self, at: At) -> Cleared {
        (self.colour(at.slice) as u32, at.step)
    }

    /// What goes to a rank in the first phase has been sent in some other way.
    pub fn was_sent(&mut self, peer: usize) {
        let plan = self.plan.clone();
        let is_it = |at: &At| {
            let step = &plan.colours[at.slice as usize % plan.colours.len()].steps[usize::from(at.step)];
            step.task == Task::Send && step.peer as usize == peer
        };
        if let Some(at) = self.ready.iter().position(is_it).and_then(|index| self.ready.remove(index)) {
            self.finish(at, &plan.colours[self.colour(at.slice)].steps[usize::from(at.step)]);
        }
    }

    /// Whether what a rank sends in the first phase is here.
    pub fn has(&self, peer: usize) -> bool {
        let step = self.plan.colours[0].receipt(0, peer as u32);
        step.is_some_and(|step| self.left.get(usize::from(step)) == Some(&DONE))
    }

    /// Whose messages are still to come or to go, once for each.
    fn missing(&self) -> impl Iterator<Item = usize> + '_ {
        let missing = self.left.iter().enumerate().filter(|(_, left)| **left != DONE);
        let missing = missing.map(|(index, _)| self.at(index));
        missing.filter(|at| !self.early.contains_key(at)).map(|at| self.step(at).peer as usize)
    }

    /// Whether a message from or for a rank has not come or gone yet.
    pub fn awaits(&self, peer: usize) -> bool {
        self.missing().any(|missing| missing == peer)
    }

    /// Whose messages are still to come or to go, as the group counts.
    pub fn awaited(&self) -> Vec<usize> {
        each_once(self.missing())
    }

    /// To whom long messages are to go of which it is not known that their receivers are there.
    pub fn uncleared(&self) -> Vec<usize> {
        each_once(self.unclear.values().flatten().map(|at| self.step(*at).peer as usize))
    }

    /// Tries again what had to wait.
    pub fn resume(&mut self) {
        self.ready.extend(self.parked.drain(..));
    }

    /// Sends what is ready.
    ///
    /// # Errors
    /// If a send fails for good.
    #[inline]
    pub fn advance<E>(&mut self, mut transmit: impl FnMut(Outgoing<'_>) -> Result<Sent, E>) -> Result<(), E> {
        while let Some(at) = self.ready.pop_front() {
            let plan = self.plan.clone();
            let colour = self.colour(at.slice);
            let step = &plan.colours[colour].steps[usize::from(at.step)];
            if self.lends() {
                let lent = self.show(&plan, step, at.slice);
                let (to, phase) = (step.peer as usize, step.phase);
                let out = Outgoing { to, phase, slice: at.slice, long: true, payload: &[], lent };
                match transmit(out)? {
                    Sent::Done => self.finish(at, step),
                    Sent::Later => self.parked.push(at),
                }
                continue;
            }
            let long = self.outgoing().is_long(&plan, step);
            if self.awaits_room || (long && !self.is_clear(at)) {
                self.unclear.entry(self.clearance(at)).or_default().push(at);
                continue;
            }
            let (mut first, mut more) = (None, Vec::new());
            self.payload(&plan, step, at.slice, |piece| match first {
                None => first = Some(piece),
                Some(start) => {
                    if more.is_empty() {
                        more.extend_from_slice(start);
                    }
                    more.extend_from_slice(piece);
                }
            });
            let payload = if more.is_empty() { first.unwrap_or_default() } else { &more[..] };
            let (to, phase) = (step.peer as usize, step.phase);
            let out = Outgoing { to, phase, slice: at.slice, long, payload, lent: None };
            match transmit(out)? {
                Sent::Done => self.finish(at, step),
                Sent::Later => self.parked.push(at),
            }
        }
        Ok(())
    }

    /// The pieces of what a step sends.
    fn payload<'r>(&'r self, plan: &Plan, step: &Step, slice: u32, mut each: impl FnMut(&'r [u8])) {
        let (layout, memory): (_, &[u8]) = match plan.sends_input {
            true => (self.outgoing(), &self.input.bytes),
            false => (&self.layout, &self.work),
        };
        // An input of one block has it at its start.
        let own = plan.sends_input && input_is_own_block(plan.kind);
        let shift = if own { layout.place(plan, plan.rank, true).map_or(0, |place| place.start) } else { 0 };
        layout.pieces(plan, &step.blocks, slice as usize, plan.sends_input, |piece| {
            each(memory.get(piece.start - shift..piece.end - shift).unwrap_or_default());
        });
    }

    #[inline]
    fn finish(&mut self, at: At, step: &Step) {
        *self.left(at) = DONE;
        self.remaining -= 1;
        if self.executor.is_some() {
            return self.tell_of_end(at, step);
        }
        for follower in &step.followers {
            let next = At { slice: at.slice, step: *follower };
            let left = self.left(next);
            if *left == DONE {
                continue;
            }
            *left -= 1;
            if *left == 0 {
                if self.step(next).task == Task::Send {
                    self.ready.push_back(next);
                } else if self.early.contains_key(&next) {
                    self.due.push_back(next);
                }
            }
        }
    }

    #[cold]
    fn tell_of_end(&mut self, at: At, step: &Step) {
        let turn = self.turn_of(at, step);
        if let Some(executor) = &mut self.executor {
            executor.done(turn);
        }
    }

    /// A message has arrived. What it makes possible is in [`has_due`](Self::has_due) and is sent by
    /// [`advance`](Self::advance).
    ///
    /// # Errors
    /// If the operation, as it was called here, has no such message.
    #[inline]
    pub fn arrive(&mut self, from: usize, phase: u16, slice: u32, part: &Part<'_>) -> Result<(), Misfit> {
        if slice as usize * self.stride >= self.left.len().max(1) {
            return Err(Misfit);
        }
        let plan = self.plan.clone();
        let colour = &plan.colours[self.colour(slice)];
        let number = colour.receipt(phase, from as u32).ok_or(Misfit)?;
        let at = At { slice, step: number };
        let step = &colour.steps[usize::from(number)];
        let expected = self.layout.message_len(&plan, &step.blocks, slice as usize);
        let left = *self.left(at);
        if left == DONE || part.len() != expected {
            return Err(Misfit);
        }
        if left > 0 || self.executor.is_some() {
            let is_first = self.early.insert(at, part.keep()).is_none();
            if let Some(executor) = &mut self.executor
                && is_first
            {
                let (route, phase, slice) = (self.plan.colours.len(), phase.into(), slice as usize);
                let message = Message { peer: from, route: slice % route, phase, slice };
                executor.arrived(message);
            }
            return if is_first { Ok(()) } else { Err(Misfit) };
        }
        self.apply(step, slice, part);
        self.finish(at, step);
        Ok(())
    }

    /// Whether something that arrived early has its turn now.
    #[inline]
    pub fn has_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Takes what arrived early and has its turn now.
    pub fn take_due(&mut self) {
        while let Some(at) = self.due.pop_front() {
            let plan = self.plan.clone();
            let step = &plan.colours[self.colour(at.slice)].steps[usize::from(at.step)];
            match self.early.remove(&at) {
                Some(Kept::Bytes(bytes)) => self.apply(step, at.slice, &Part::Body(&Body::Owned(&bytes))),
                Some(Kept::Lent(memory)) => self.apply(step, at.slice, &Part::Lent(memory)),
                None => continue,
            }
            self.finish(at, step);
        }
    }

    /// Stores or combines what has arrived.
    fn apply(&mut self, step: &Step, slice: u32, part: &Part<'_>) {
        let Task::Receive(action) = step.task else { return };
        let shift = if self.lends() { self.own_start() } else { 0 };
        let Run { plan, layout, work, combiner, parts, .. } = self;
        if !parts.is_empty() && action == Action::Store {
            let at = step.blocks.iter().next().map(|block| slice as usize * plan.blocks + block);
            if let Some(place) = at.and_then(|at| parts.get_mut(at)) {
                *place = Some(part.keep());
            }
            return;
        }
        let mut taken = 0;
        layout.pieces(plan, &step.blocks, slice as usize, false, |piece| {
            let (piece, len) = (piece.start - shift..piece.end - shift, piece.len());
            if action == Action::Store {
                store(part.source(), taken, piece, work);
            } else if let (Some(combiner), Some(target)) = (combiner.as_ref(), work.get_mut(piece)) {
                combine(combiner, action == Action::Prepend, part, taken, target);
            }
            taken += len;
        });
    }

    /// What combines its vectors, once nothing more is to be combined.
    pub fn take_combiner(&mut self) -> Option<Combiner> {
        self.combiner.take()
    }

    /// What the operation gives to its caller; `None`: nothing, on this rank.
    pub fn into_result(mut self) -> Option<Bytes> {
        if self.input.lent.as_ref().is_some_and(|lent| lent.exchange.is_some()) {
            self.put_together();
            return None;
        }
        let Run { plan, layout, input, mut work, .. } = self;
        let is_root = plan.rank == plan.root;
        // What no message of a schedule of the user's has brought.
        let whole = |work: &mut Vec<u8>| work.resize(work.len().max(layout.total(&plan)), 0);
        match plan.kind {
            Kind::Barrier => None,
            Kind::Reduce | Kind::Gather if !is_root => None,
            Kind::Broadcast if is_root => Some(input.bytes),
            Kind::Scatter if is_root => Some(
                layout.place(&plan, plan.rank, true).map_or_else(Bytes::new, |own| input.bytes.slice(own)),
            ),
            Kind::Scatter | Kind::ReduceScatter => {
                let own = layout.place(&plan, plan.rank, false).unwrap_or(0..0);
                whole(&mut work);
                Some(Bytes::from(work).slice(own))
            }
            _ => {
                whole(&mut work);
                Some(Bytes::from(work))
            }
        }
    }
}

fn each_once(peers: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut peers: Vec<usize> = peers.collect();
    peers.sort_unstable();
    peers.dedup();
    peers
}

/// Whether a rank that only sends gives its caller what it was given, or nothing.
fn is_input_the_result(plan: &Plan) -> bool {
    let receives =
        plan.colours.iter().flat_map(|colour| colour.steps.iter()).any(|step| step.task != Task::Send);
    match plan.kind {
        Kind::Broadcast | Kind::Scatter => plan.rank == plan.root,
        Kind::Reduce | Kind::Gather => plan.rank != plan.root && !receives,
        _ => false,
    }
}
