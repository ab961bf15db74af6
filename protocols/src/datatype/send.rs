//! Messages that are sent from one layout and received into another.

use super::error::{Side, TransferError, TypedError};
use super::{Layout, Machine, Signature, Source, Target};
use crate::buffer::Buffer;
use crate::handler::ActiveMessage;
use crate::message::Message;
use crate::send::SendMessage;
use posthaste_core::context::Face;
use posthaste_core::{Fault, Rank, RmaError};

/// Bytes that are packed at a time.
const STAGING: usize = 8 << 10;
/// From this many bytes on, a message is packed into page memory of the device, if there is some.
const LOAN_MIN: u64 = 4096;

impl<F: Face> ActiveMessage<F> {
    /// Sends the elements of a layout, packed. The message says which elements it has, for
    /// [`Message::scatter`](Message::scatter); its info is used for that. What is borrowed is packed before this returns.
    ///
    /// # Errors
    /// If the layout is not inside of the memory, or there is no memory to pack it.
    ///
    /// # Cancel safety
    /// See [`SendMessage`].
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// use posthaste::datatype::{Datatype, Layout};
    /// use posthaste::{Message, Scope};
    /// let sum = job.counter();
    /// let count = sum.clone();
    /// let byte = Datatype::of::<u8>();
    /// let element = byte.clone();
    /// let row = job.register("row", move |message: Message, _: &mut Scope| {
    ///     let mut row = [0; 4];
    ///     // A message of other elements is refused.
    ///     message.scatter(&mut row, &Layout::new(&element, 4)).expect("four bytes");
    ///     count.add(row.iter().map(|byte| u64::from(*byte)).sum());
    /// })?;
    /// // A column of a matrix of 4 × 4 is sent as it lies, and comes as a row.
    /// let column = byte.vector(4, 1, 4)?;
    /// let matrix: Vec<u8> = (0..16).collect();
    /// row.send_typed(job.rank(), &matrix, &Layout::new(&column, 1).at(3))?.await?;
    /// sum.reach(3 + 7 + 11 + 15).await;
    /// assert_eq!(sum.value(), 36);
    /// # job.leave().await
    /// # }
    /// ```
    pub fn send_typed<'s>(
        &self,
        target: Rank,
        memory: impl Into<Source<'s>>,
        layout: &Layout<'_>,
    ) -> Result<SendMessage<'_, F>, TypedError> {
        let memory = memory.into();
        let size = layout.check(Side::Source, memory.len() as u64)?;
        let count = layout.count;
        let signature = layout.signature().ok_or(TransferError::Count { side: Side::Source, count })?;
        let mut machine = Machine::new(layout)?;
        let loan = if size >= LOAN_MIN { self.loan(size as usize) } else { None };
        let packed: Buffer = match loan {
            Some(loan) => {
                machine.gather(memory, loan.memory())?;
                loan.into()
            }
            None => pack(&[], &mut machine, memory, size)?.into(),
        };
        Ok(self.send(target, packed).info(&signature.to_bytes()))
    }
}

impl Message<'_> {
    /// Which elements the message has, if it was sent with [`ActiveMessage::send_typed`].
    #[must_use]
    pub fn signature(&self) -> Option<Signature> {
        Signature::from_bytes(self.info())
    }

    /// Unpacks a message that was sent with [`ActiveMessage::send_typed`] into a layout of the same elements. Returns the
    /// number of bytes.
    ///
    /// # Errors
    /// If the elements are others, or the layout is not inside of the memory. Nothing was copied then.
    pub fn scatter<'t>(
        &self,
        memory: impl Into<Target<'t>>,
        layout: &Layout<'_>,
    ) -> Result<u64, TransferError> {
        let memory = memory.into();
        let theirs = self.signature().ok_or(TransferError::Untyped)?;
        let count = layout.count;
        let ours = layout.signature().ok_or(TransferError::Count { side: Side::Target, count })?;
        if theirs != ours {
            let (source_signature, target_signature) = (Box::new(theirs), Box::new(ours));
            return Err(TransferError::Signature { source_signature, target_signature });
        }
        let size = layout.check(Side::Target, memory.len() as u64)?;
        let data = self.source_bytes();
        if data.len() as u64 != size {
            return Err(TransferError::Length { len: data.len() as u64, size });
        }
        Machine::new(layout)?.scatter(memory, data)
    }
}

/// These bytes, and then so many of a layout, packed, if there is memory for them.
pub(crate) fn pack<'m>(
    head: &[u8],
    machine: &mut Machine,
    memory: impl Into<Source<'m>>,
    bytes: u64,
) -> Result<Vec<u8>, TypedError> {
    let memory = memory.into();
    let mut packed = Vec::new();
    let full = RmaError::Fault(Fault::OutOfMemory("there is none to pack a layout"));
    let len = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_add(head.len()));
    let len = len.ok_or_else(|| full.clone())?;
    packed.try_reserve_exact(len).map_err(|_| full)?;
    packed.extend_from_slice(head);
    // Through the first cache, which costs less than to write all of the new memory before it is written.
    let mut staging = [0; STAGING];
    while packed.len() < len {
        let most = STAGING.min(len - packed.len());
        let count = machine.gather(memory, &mut staging[..most])? as usize;
        if count == 0 {
            return Err(TransferError::Length { len: packed.len() as u64, size: len as u64 }.into());
        }
        packed.extend_from_slice(&staging[..count]);
    }
    Ok(packed)
}
