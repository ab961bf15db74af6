//! What is traced, for tests to read.

use std::io::Write;
use std::sync::{Arc, Mutex};

/// The lines that were traced.
#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// From now on, while the guard is there, everything that this thread traces.
    pub fn of_this_thread() -> (Lines, tracing::subscriber::DefaultGuard) {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (lines, tracing::subscriber::set_default(subscriber))
    }

    /// Takes what has been traced.
    pub fn take(&self) -> String {
        let bytes = std::mem::take(&mut *self.0.lock().expect("no panic"));
        String::from_utf8(bytes).expect("text")
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
