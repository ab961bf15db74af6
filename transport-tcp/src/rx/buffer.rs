//! Bytes between a socket and a parser.

/// Bytes between a socket and a parser.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    pub bytes: Vec<u8>,
    pub start: usize,
    pub end: usize,
}

impl Buffer {
    pub fn data(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }

    pub fn consume(&mut self, count: usize) {
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Room behind the data, of a buffer of that capacity.
    pub fn room(&mut self, capacity: usize) -> &mut [u8] {
        if self.bytes.len() < capacity {
            self.bytes.resize(capacity, 0);
        }
        if self.start > 0 && self.bytes.len() - self.end < capacity / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    pub fn append(&mut self, bytes: &[u8]) {
        if self.bytes.len() - self.end < bytes.len() {
            if self.start > 0 {
                self.bytes.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            }
            let needed = self.end + bytes.len();
            if needed > self.bytes.len() {
                self.bytes.resize(needed.max(2 * self.bytes.len()), 0);
            }
        }
        self.bytes[self.end..self.end + bytes.len()].copy_from_slice(bytes);
        self.end += bytes.len();
    }
}
