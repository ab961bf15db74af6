//! What a pattern does, as text.

use super::Pattern;
use posthaste_core::context::Face;
use posthaste_core::descriptor::{Descriptor, Op};
use posthaste_core::engine::{PatternError, Scope};
use posthaste_core::{ProtocolId, wire};
use std::fmt::Write;

impl Pattern {
    /// A table of what a replay does: a line for each operation, by target and in the order of injection, with its kind,
    /// its bytes and its places.
    ///
    /// # Errors
    /// If its context is closed.
    ///
    /// # Cancel safety
    /// Cancel safe.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> posthaste::Result<()> {
    /// let job = posthaste::solo().await?;
    /// let (window, source) = (job.shmalloc::<u8>(64).await?, job.region(16).await?);
    /// let pattern = job.record(|recorder| recorder.put(&window, job.rank(), 40, &source)).await?;
    /// let table = pattern.describe().await?;
    /// assert!(table.contains("1 operations, 16 bytes"), "{table}");
    /// assert!(table.lines().any(|line| line.contains("put") && line.contains("at 40")), "{table}");
    /// # job.leave().await
    /// # }
    /// ```
    pub async fn describe(&self) -> Result<String, PatternError> {
        let id = self.id;
        let posted = self.handle.post(move |scope: &mut Scope<'_>| {
            let recorded = scope.recorded(id).to_vec();
            let name = |descriptor: &Descriptor| scope.protocol_name(local(descriptor));
            let names: Vec<Option<String>> = recorded.iter().map(name).collect();
            if recorded.is_empty() { Err(scope.why_unusable(id)) } else { Ok((recorded, names)) }
        });
        let (recorded, names) = std::future::poll_fn(|cx| posted.poll(cx)).await?;
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write(&mut text, &recorded, &names);
        Ok(text)
    }

    fn write(
        &self,
        text: &mut String,
        recorded: &[Descriptor],
        names: &[Option<String>],
    ) -> std::fmt::Result {
        let way = if self.fifo.is_some() { "a FIFO of its own" } else { "the FIFOs of its targets" };
        let (id, slots) = (self.id, recorded.len());
        writeln!(
            text,
            "{id}: {} operations, {} bytes, {slots} slots, through {way}",
            self.messages, self.bytes
        )?;
        writeln!(text, "  {:>6}  {:<9}{:>12}  {:<24}from", "rank", "kind", "bytes", "to")?;
        let operations = recorded.iter().zip(names).filter(|(descriptor, _)| descriptor.op != Op::Nop);
        for (descriptor, name) in operations {
            let [region, first] = descriptor.source;
            let here = format!("region {region} at {first}");
            let there = || format!("{} at {}", self.window_of(descriptor), descriptor.offset);
            let (kind, to, from) = match descriptor.op {
                Op::Put => ("put", there(), here),
                Op::Get => ("get", here, there()),
                Op::Atomic => ("signal", there(), String::new()),
                _ => ("send", format!("{:?}", name.as_deref().unwrap_or("?")), here),
            };
            write!(text, "  {:>6}  {kind:<9}{:>12}  {to:<24}{from}", descriptor.rank.0, descriptor.len)?;
            match descriptor.info_len {
                0 => writeln!(text)?,
                len => writeln!(text, ", info of {len} bytes")?,
            }
        }
        Ok(())
    }

    fn window_of(&self, descriptor: &Descriptor) -> String {
        let window = self.windows.iter().find(|window| {
            let mut parts = window.parts.iter();
            parts.any(|part| part.rank == descriptor.rank && part.remote == descriptor.region as usize)
        });
        window.map_or_else(|| "?".to_owned(), |window| window.id.to_string())
    }
}

fn local(descriptor: &Descriptor) -> ProtocolId {
    ProtocolId(descriptor.protocol.0.saturating_sub(wire::FIRST_USER))
}
