//! Frames: `u32 length | u8 kind | u32 id | body`, little-endian. Converts received bytes to frames, and frames to
//! bytes.
//!
//! Both buffers are bounded: a frame that is too long ends the channel, and producers of output check for space first.

use std::io::{self, Read, Write};

/// Maximum length of kind, id and body together.
pub const MAX_FRAME: usize = (1 << 20) + (64 << 10);
const HEAD: usize = 5; // kind and id
const READ_BYTES: usize = 64 << 10;
const ROOMY: usize = 256 << 10; // queued bytes above which nothing is read from commands and files
const FULL: usize = 1 << 20; // queued bytes above which no request is read

/// A message from the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub id: u32,
    pub body: Vec<u8>,
}

/// The host violated the protocol; the channel must be closed.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Received bytes that are not a complete frame yet.
#[derive(Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    start: usize,
}

impl Inbox {
    /// Read one piece. `Ok(0)` at the end of the channel; `WouldBlock` if there is nothing to read.
    pub fn fill(&mut self, from: &mut impl Read) -> io::Result<usize> {
        self.bytes.drain(..self.start);
        self.start = 0;
        let had = self.bytes.len();
        self.bytes.resize(had + READ_BYTES, 0);
        let took = from.read(&mut self.bytes[had..]);
        self.bytes.truncate(had + took.as_ref().map_or(0, |n| *n));
        if self.bytes.is_empty() {
            self.bytes = Vec::new(); // an idle agent holds no buffer
        }
        took
    }

    /// The next complete frame.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Malformed> {
        let waiting = &self.bytes[self.start..];
        let Some((length, rest)) = waiting.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if !(HEAD..=MAX_FRAME).contains(&length) {
            return Err(Malformed("a frame's length is out of bounds"));
        }
        if rest.len() < length {
            return Ok(None);
        }
        let id = u32::from_le_bytes([rest[1], rest[2], rest[3], rest[4]]);
        let frame = Frame { kind: rest[0], id, body: rest[HEAD..length].to_vec() };
        self.start += 4 + length;
        Ok(Some(frame))
    }

    /// Add bytes that were read elsewhere, for instance in tests.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
}

/// Frames that wait to be sent to the host.
#[derive(Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    start: usize,
}

impl Outbox {
    /// Append a frame whose body is the concatenation of `parts`.
    pub fn put(&mut self, kind: u8, id: u32, parts: &[&[u8]]) {
        let length = HEAD + parts.iter().map(|part| part.len()).sum::<usize>();
        self.bytes.extend_from_slice(&(length as u32).to_le_bytes());
        self.bytes.push(kind);
        self.bytes.extend_from_slice(&id.to_le_bytes());
        for part in parts {
            self.bytes.extend_from_slice(part);
        }
    }

    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether more output may be read from commands and files.
    pub fn has_room(&self) -> bool {
        self.len() < ROOMY
    }

    /// Whether requests must wait until the host has read responses.
    pub fn is_full(&self) -> bool {
        self.len() >= FULL
    }

    /// Send as much as the channel accepts. `Ok` also if it accepts nothing now.
    pub fn flush(&mut self, to: &mut impl Write) -> io::Result<()> {
        while !self.is_empty() {
            match to.write(&self.bytes[self.start..]) {
                Ok(0) => return Ok(()),
                Ok(sent) => self.start += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.is_empty() {
            *self = Self::default();
        } else if self.start > ROOMY {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        Ok(())
    }
}
