//! One running command: its first process, its pipes, its deadline.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::frames::{Malformed, Outbox};
use crate::output::{Kept, Pipe};
use crate::processes::Hunt;
use crate::requests::{APART, Run, STDIN};
use crate::spawn::{Spawner, Streams};
use crate::sys;
use crate::users::User;

/// Bytes of standard input that the host may send before the agent reports that some were consumed.
pub const INPUT_WINDOW: usize = 256 << 10;
const AT_DEADLINE: u8 = 1;

pub struct Command {
    pub id: u32,
    pub pid: i32,
    pub pipes: Vec<Pipe>,
    pub input: Option<Input>,
    pub muted: bool, // its host disconnected: it continues, and its result is not sent
    kept: Kept,
    deadline: Instant,
    mark: u64,          // the mark of all its descendants
    hunt: Option<Hunt>, // set while its descendants are being killed
    late: bool,
    status: Option<i32>, // of its first process, after that ended
}

/// Standard input that waits to be written to a command.
pub struct Input {
    pub pipe: PipeWriter,
    pub waiting: VecDeque<u8>,
    pub last: bool,
}

impl Command {
    /// Start the command. Errors are those of the kernel, for lack of resources.
    pub fn start(id: u32, run: &Run, user: &User, spawner: &mut Spawner) -> io::Result<Self> {
        let ours = |reader: io::PipeReader| -> io::Result<File> {
            sys::set_blocking(reader.as_fd(), false)?;
            let _ = sys::give_to(&reader, user.uid, user.gid); // so that it can be opened as /dev/stdout
            Ok(OwnedFd::from(reader).into())
        };
        let (stdin, input) = if run.flags & STDIN != 0 {
            let (reader, writer) = io::pipe()?;
            sys::set_blocking(writer.as_fd(), false)?;
            let _ = sys::give_to(&reader, user.uid, user.gid);
            (reader.into(), Some(Input { pipe: writer, waiting: VecDeque::new(), last: false }))
        } else {
            (File::open("/dev/null")?.into(), None)
        };
        let (reader, writer) = io::pipe()?;
        let mut pipes = vec![Pipe::new(ours(reader)?, 1)];
        let (stdout, stderr): (OwnedFd, OwnedFd) = if run.flags & APART != 0 {
            let (reader, errors) = io::pipe()?;
            pipes.push(Pipe::new(ours(reader)?, 2));
            (writer.into(), errors.into())
        } else {
            (writer.try_clone()?.into(), writer.into())
        };
        let deadline = Instant::now() + Duration::from_millis(run.deadline_ms.into());
        let (pid, mark) = spawner.spawn(run, user, &Streams { stdin, stdout, stderr })?;
        let kept = Kept::new(run);
        Ok(Self { id, pid, pipes, input, muted: false, kept, deadline, mark, hunt: None, late: false, status: None })
    }

    /// The time of the next `tend`, if nothing happens before.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        match (&self.hunt, self.status) {
            (Some(_), _) => Some(now + Duration::from_millis(1)),
            (None, Some(_)) => None,
            (None, None) => Some(self.deadline),
        }
    }

    /// Continue to kill what the command started, if it is late or a kill was requested; one step per call.
    pub fn tend(&mut self, now: Instant) {
        if self.hunt.is_none() && self.status.is_none() && now >= self.deadline {
            self.late = true;
            self.kill();
        }
        let root_is_there = self.status.is_none();
        if self.hunt.as_mut().is_some_and(|hunt| hunt.step(root_is_there)) && !root_is_there {
            self.hunt = None;
            self.pipes.iter_mut().for_each(Pipe::limit_to_current);
        }
    }

    /// Start to kill the command and all of its descendants.
    pub fn kill(&mut self) {
        if self.hunt.is_none() && self.status.is_none() {
            let mut hunt = Hunt::new(self.pid, self.mark);
            hunt.step(true);
            self.hunt = Some(hunt);
        }
    }

    /// Record that its first process has ended.
    pub fn ended(&mut self, status: i32) {
        self.status = Some(status);
        self.input = None;
        if self.hunt.is_none() {
            self.pipes.iter_mut().for_each(Pipe::limit_to_current);
        }
    }

    /// Read a piece from pipe `which`.
    pub fn take_output(&mut self, which: usize, buffer: &mut [u8], out: &mut Outbox) {
        let pipe = &mut self.pipes[which];
        let length = pipe.take(buffer);
        if length > 0 && !self.muted {
            self.kept.add(self.id, pipe.stream, &buffer[..length], out);
        }
    }

    /// Whether the command has ended and all of its output was read.
    pub fn is_over(&self) -> bool {
        self.status.is_some() && self.hunt.is_none() && self.pipes.iter().all(Pipe::is_done)
    }

    /// Send the result. Returns the pipes that background processes still hold open.
    pub fn finish(mut self, out: &mut Outbox) -> impl Iterator<Item = Pipe> + use<> {
        if !self.muted {
            self.kept.finish(self.id, out);
            let code = if self.late { 128 + sys::SIGKILL } else { sys::exit_code(self.status.unwrap_or(0)) };
            let flags = if self.late { AT_DEADLINE } else { 0 };
            out.put(b'x', self.id, &[&code.to_le_bytes(), &[flags], &self.kept.total.to_le_bytes()]);
        }
        self.pipes.into_iter().filter(|pipe| !pipe.closed).map(|pipe| Pipe { left: None, ..pipe })
    }

    /// Add standard input; empty data means its end.
    pub fn feed(&mut self, data: &[u8], out: &mut Outbox) -> Result<(), Malformed> {
        match &mut self.input {
            Some(input) if data.is_empty() => input.last = true,
            Some(input) if input.waiting.len() + data.len() > INPUT_WINDOW => {
                return Err(Malformed("more standard input than there is room for"));
            }
            Some(input) => input.waiting.extend(data),
            None if data.is_empty() => {}
            None => self.took(data.len(), out), // it reads no more: so much for that
        }
        self.pass_input(out);
        Ok(())
    }

    /// Write waiting standard input to the command, as much as it accepts.
    pub fn pass_input(&mut self, out: &mut Outbox) {
        let Some(input) = &mut self.input else { return };
        let mut took = 0;
        let mut open = true;
        while open && !input.waiting.is_empty() {
            match input.pipe.write(input.waiting.as_slices().0) {
                Ok(length) => {
                    input.waiting.drain(..length);
                    took += length;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    took += input.waiting.len(); // it closed its end
                    open = false;
                }
            }
        }
        if !open || input.last && input.waiting.is_empty() {
            self.input = None;
        }
        if took > 0 {
            self.took(took, out);
        }
    }

    fn took(&self, length: usize, out: &mut Outbox) {
        if !self.muted {
            out.put(b'i', self.id, &[&(length as u32).to_le_bytes()]);
        }
    }
}
