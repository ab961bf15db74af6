//! What head and agents say to each other: a line that tells the agent from whatever a login may print, then frames.
//!
//! ```text
//! frame   kind: 1 | rank or signal: 4 | length: 4 | body          little-endian
//! ```

use std::io::{self, Read, Write};

/// The line with which an agent begins; its version follows, and the end of the line.
pub(crate) const GREETING: &[u8] = b"posthaste-agent ";
/// What head and agent must have in common.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// What a login may print before the agent speaks.
const MOST_NOISE: usize = 64 << 10;
/// The longest body: an order with a long argument list.
const MOST: usize = 4 << 20;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// To the agent: what to start.
    Order = 1,
    /// To the agent: a signal for the ranks.
    Signal = 2,
    /// To the head: the ranks run.
    Started = 3,
    /// To the head: what a rank has printed on its standard output.
    Out = 4,
    /// To the head: and on its standard error.
    Err = 5,
    /// To the head: the first failure of the agent's ranks.
    Failed = 6,
    /// To the head: how a rank has ended; said when all have.
    Ended = 7,
    /// To the head: there is no more to say.
    Done = 8,
    /// To the head: why nothing was started.
    Refused = 9,
    /// To the head: a process that was a rank has ended.
    Reaped = 10,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        use Kind::{Done, Ended, Err, Failed, Order, Out, Reaped, Refused, Signal, Started};
        [Order, Signal, Started, Out, Err, Failed, Ended, Done, Refused, Reaped]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    /// A rank or a signal.
    pub(crate) number: u32,
    pub(crate) body: Vec<u8>,
}

/// Writes a frame in one piece.
pub(crate) fn write_frame(to: &mut impl Write, kind: Kind, number: u32, body: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(9 + body.len());
    bytes.push(kind as u8);
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(body);
    let written = to.write_all(&bytes).and_then(|()| to.flush());
    // It may be an order.
    zeroize::Zeroize::zeroize(&mut bytes);
    written
}

/// The next frame; none at the end of the stream.
pub(crate) fn read_frame(from: &mut impl Read) -> io::Result<Option<Frame>> {
    let invalid = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut head = [0; 9];
    loop {
        match from.read(&mut head[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    from.read_exact(&mut head[1..])?;
    let kind = Kind::from_byte(head[0]).ok_or_else(|| invalid("a frame of no known kind"))?;
    let number = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
    let length = u32::from_le_bytes([head[5], head[6], head[7], head[8]]) as usize;
    if length > MOST {
        return Err(invalid("a frame of an impossible length"));
    }
    // Taken as it comes: a length alone costs nothing.
    let mut body = Vec::new();
    from.take(length as u64).read_to_end(&mut body)?;
    if body.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(Frame { kind, number, body }))
}

/// Reads up to the agent's first line, and gives its version.
pub(crate) fn read_greeting(from: &mut impl Read) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    for _ in 0..MOST_NOISE {
        from.read_exact(&mut byte)?;
        if byte[0] != b'\n' {
            line.push(byte[0]);
            continue;
        }
        // Something may have been printed without the end of a line.
        let found = line.windows(GREETING.len()).rposition(|window| window == GREETING);
        if let Some(at) = found {
            let version = String::from_utf8_lossy(&line[at + GREETING.len()..]);
            return Ok(version.escape_debug().to_string());
        }
        line.clear();
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "what came is no agent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_go_round_and_pieces_of_them_are_errors() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, Kind::Out, 7, b"text").unwrap();
        write_frame(&mut bytes, Kind::Done, 0, b"").unwrap();
        let mut from = &bytes[..];
        let first = Frame { kind: Kind::Out, number: 7, body: b"text".to_vec() };
        assert_eq!(read_frame(&mut from).unwrap(), Some(first));
        assert_eq!(read_frame(&mut from).unwrap().unwrap().kind, Kind::Done);
        assert_eq!(read_frame(&mut from).unwrap(), None);
        for cut in 1..13 {
            assert!(read_frame(&mut &bytes[..cut]).is_err(), "cut at {cut}");
        }
        let mut huge = bytes.clone();
        huge[5..9].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read_frame(&mut &huge[..]).is_err());
        huge[0] = 0;
        assert!(read_frame(&mut &huge[..]).is_err());
    }

    #[test]
    fn the_greeting_is_found_behind_what_a_login_prints() {
        let heard = b"Welcome!\nposthaste- agent\nno newline: posthaste-agent 1.2.3\nrest";
        let mut from = &heard[..];
        assert_eq!(read_greeting(&mut from).unwrap(), "1.2.3");
        assert_eq!(from, b"rest");
        assert!(read_greeting(&mut &b"a\nb"[..]).is_err());
        let endless = vec![b'x'; MOST_NOISE + 1];
        assert!(read_greeting(&mut &endless[..]).is_err());
    }
}
