//! The channel to the host: an inherited socket, a pair of pipes, or a virtio-serial port.
//!
//! The end of a socket or pipe means the end of the host, and so of the machine. A port survives the connections of its
//! host: a restored virtual machine gets a new host. Requests of the previous host are then dropped.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::frames::{Inbox, Outbox};
use crate::options::Channel;
use crate::sys::{self, POLLERR, POLLHUP, POLLIN, POLLOUT, Poll};

const VERSION: u32 = 1;
const PORT_APPEARS: Duration = Duration::from_secs(30);

/// The state of the channel.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub enum State {
    Up,
    Changed, // a new host connected, or the last one disconnected
    Ended,
}

pub struct Link {
    input: File,
    output: File,
    is_port: bool,
    connected: bool,
    pub inbox: Inbox,
    pub outbox: Outbox,
}

impl Link {
    pub fn open(channel: &Channel) -> io::Result<Self> {
        let (input, output) = match channel {
            Channel::Fd(fd) => {
                let input = File::from(sys::take_over(*fd)?);
                let output = input.try_clone()?;
                (input, output)
            }
            Channel::Stdio => (copy(0)?, copy(1)?),
            Channel::Port(path) => {
                let input = open_port(path)?;
                let output = input.try_clone()?;
                (input, output)
            }
        };
        let is_port = matches!(channel, Channel::Port(_));
        for end in [&input, &output] {
            sys::set_blocking(end.as_fd(), false)?;
        }
        let (inbox, outbox) = Default::default();
        let mut link = Self { input, output, is_port, connected: !is_port, inbox, outbox };
        if !is_port {
            link.greet();
        }
        Ok(link)
    }

    fn greet(&mut self) {
        self.outbox.put(b'h', 0, &[&VERSION.to_le_bytes()]);
    }

    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// The descriptors to poll.
    pub fn wanted(&self) -> Vec<Poll> {
        if !self.connected {
            return Vec::new();
        }
        let reads = if self.outbox.is_full() { 0 } else { POLLIN };
        let writes = if self.outbox.is_empty() { 0 } else { POLLOUT };
        let mut wanted = vec![Poll { fd: self.input.as_raw_fd(), events: reads, found: 0 }];
        if self.input.as_raw_fd() == self.output.as_raw_fd() {
            wanted[0].events |= writes;
        } else {
            wanted.push(Poll { fd: self.output.as_raw_fd(), events: writes, found: 0 });
        }
        wanted
    }

    /// Send what can be sent, and receive if the poll result `found` says so.
    pub fn move_bytes(&mut self, found: i16) -> State {
        if !self.connected {
            return self.look_for_host();
        }
        let gone = if self.is_port { POLLHUP } else { POLLERR };
        if found & gone != 0 {
            return self.lose();
        }
        if found & !POLLOUT != 0 && !self.outbox.is_full() {
            match self.inbox.fill(&mut self.input) {
                Ok(0) => return self.lose(),
                Ok(_) => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(_) => return self.lose(),
            }
        }
        State::Up
    }

    /// Send what can be sent.
    pub fn flush(&mut self) -> State {
        if self.connected && self.outbox.flush(&mut self.output).is_err() { self.lose() } else { State::Up }
    }

    fn lose(&mut self) -> State {
        self.connected = false;
        (self.inbox, self.outbox) = Default::default();
        if self.is_port { State::Changed } else { State::Ended }
    }

    fn look_for_host(&mut self) -> State {
        let mut poll = [Poll { fd: self.input.as_raw_fd(), events: POLLOUT, found: 0 }];
        sys::wait(&mut poll, 0);
        if poll[0].found & POLLHUP != 0 || poll[0].found == 0 {
            return State::Up;
        }
        self.connected = true;
        self.greet();
        State::Changed
    }
}

fn copy(fd: i32) -> io::Result<File> {
    Ok(sys::copy_above_standard(fd)?.into())
}

/// Open a port. Its device may appear after its driver.
fn open_port(path: &str) -> io::Result<File> {
    let until = Instant::now() + PORT_APPEARS;
    loop {
        let mut options = File::options();
        match options.read(true).write(true).custom_flags(sys::O_NONBLOCK).open(path) {
            Err(error) if error.raw_os_error() == Some(sys::ENOENT) && Instant::now() < until => {
                sleep(Duration::from_millis(5));
            }
            opened => return Ok(OwnedFd::from(opened?).into()),
        }
    }
}
