//! The output of a command: read from its pipes when there is space, and sent at once or kept up to a bound.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};

use crate::frames::Outbox;
use crate::requests::{APART, Run, WHOLE};
use crate::sys;

const CHUNK: usize = 64 << 10;
const MOST_HELD: usize = 256 << 10; // bytes of one command's last half; for more, the host requests streaming

/// The reading end of a pipe. `left`: how many bytes are still read after the command has ended.
pub struct Pipe {
    pub file: File,
    pub stream: u8,
    pub left: Option<usize>,
    pub closed: bool, // nobody writes any more
}

impl Pipe {
    pub fn new(file: File, stream: u8) -> Self {
        Self { file, stream, left: None, closed: false }
    }

    /// The command has ended: only what is in the pipe now is its output, not what background processes write later.
    pub fn limit_to_current(&mut self) {
        self.left = Some(sys::bytes_waiting(&self.file));
    }

    pub fn is_done(&self) -> bool {
        self.closed || self.left == Some(0)
    }

    /// Read one piece of output; 0 bytes if there is none now.
    pub fn take(&mut self, buffer: &mut [u8]) -> usize {
        let most = self.left.unwrap_or(CHUNK).min(buffer.len()).min(CHUNK);
        match self.file.read(&mut buffer[..most]) {
            Ok(0) => self.closed = most > 0,
            Ok(length) => {
                self.left = self.left.map(|left| left - length);
                return length;
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => self.closed = true,
        }
        0
    }
}

/// Where output goes: to the host at once, or the first half at once and the last half at the end.
pub struct Kept {
    at_once: usize, // bytes that are still sent as they come
    held: VecDeque<u8>,
    most_held: usize,
    apart: bool,
    pub total: u64,
}

impl Kept {
    pub fn new(run: &Run) -> Self {
        let limit = run.output_bytes as usize;
        let everything = run.flags & (APART | WHOLE) != 0;
        Self {
            at_once: if everything { usize::MAX } else { limit / 2 },
            held: VecDeque::new(),
            most_held: if everything { 0 } else { (limit - limit / 2).min(MOST_HELD) },
            apart: run.flags & APART != 0,
            total: 0,
        }
    }

    /// Add output of stream 1 or 2.
    pub fn add(&mut self, id: u32, stream: u8, data: &[u8], out: &mut Outbox) {
        self.total += data.len() as u64;
        let (now, later) = data.split_at(self.at_once.min(data.len()));
        if !now.is_empty() {
            out.put(b'o', id, &[&[if self.apart { stream } else { 0 }], now]);
        }
        if self.at_once != usize::MAX {
            self.at_once -= now.len();
        }
        let last = &later[later.len().saturating_sub(self.most_held)..];
        let over = (self.held.len() + last.len()).saturating_sub(self.most_held);
        self.held.drain(..over.min(self.held.len()));
        self.held.extend(last);
    }

    /// Send the output that was kept.
    pub fn finish(&mut self, id: u32, out: &mut Outbox) {
        let (first, second) = self.held.as_slices();
        if !first.is_empty() {
            out.put(b'o', id, &[&[0], first, second]);
        }
        self.held = VecDeque::new();
    }
}
