//! The main loop: one thread that waits for the host, pipes, children and deadlines, and never blocks on anything else.
//!
//! Commands, transfers and queued bytes are all bounded. If the host does not read, the agent stops reading from
//! commands too, and their output waits in their pipes.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crate::command::Command;
use crate::frames::{Frame, Malformed};
use crate::identity::Identity;
use crate::link::{Link, State};
use crate::options::Options;
use crate::output::Pipe;
use crate::requests::{self, APART, Request, Run};
use crate::spawn::Spawner;
use crate::sys::{self, POLLIN, POLLOUT, Poll};
use crate::transfers::Transfers;
use crate::{processes, users};

const MAX_COMMANDS: usize = 256;
const MAX_LEFT_PIPES: usize = 256; // pipes held open by background processes; they are drained so that nobody blocks
const MAX_FREEZES: usize = 16;
const CHUNK: usize = 64 << 10;
const HOST_LOOK: Duration = Duration::from_millis(10);
const TICK: Duration = Duration::from_millis(1);
const LAST_KILLS: u32 = 2000; // ticks

pub struct Agent {
    link: Link,
    children: File, // readable when one has ended
    spawner: Spawner,
    user: String,
    commands: Vec<Command>,
    transfers: Transfers,
    left: VecDeque<Pipe>,
    identity: Identity,
    frozen: bool,
    freezing: Vec<u32>, // ids of the requests that wait for the freeze
    buffer: Vec<u8>,
}

/// What a polled descriptor belongs to.
#[derive(Clone, Copy)]
enum Of {
    Link,
    Children,
    Output(usize, usize),
    Input(usize),
    Left(usize),
}

impl Agent {
    pub fn new(link: Link, options: &Options) -> io::Result<Self> {
        Ok(Self {
            link,
            children: sys::ended_children()?,
            spawner: Spawner::new(options)?,
            user: options.user.clone(),
            commands: Vec::new(),
            transfers: Transfers::new(options)?,
            left: VecDeque::new(),
            identity: Identity::default(),
            frozen: false,
            freezing: Vec::new(),
            buffer: vec![0; CHUNK],
        })
    }

    /// Serve requests until the channel ends; then kill everything.
    pub fn serve(&mut self) -> Result<(), Malformed> {
        let result = self.serve_host();
        for _ in 0..LAST_KILLS {
            if !processes::kill_all() {
                break;
            }
            while sys::reap().is_some() {}
            std::thread::sleep(TICK);
        }
        result
    }

    fn serve_host(&mut self) -> Result<(), Malformed> {
        loop {
            if self.turn()? == State::Ended {
                return Ok(());
            }
        }
    }

    fn turn(&mut self) -> Result<State, Malformed> {
        let (of, mut polls) = self.waited_for();
        sys::wait(&mut polls, self.patience_ms());
        let (mut host, mut ended) = (0, false);
        for (of, poll) in of.into_iter().zip(polls) {
            match of {
                Of::Link => host |= poll.found,
                _ if poll.found == 0 => {}
                Of::Children => ended = true,
                Of::Output(at, which) => {
                    self.commands[at].take_output(which, &mut self.buffer, &mut self.link.outbox);
                }
                Of::Input(at) => self.commands[at].pass_input(&mut self.link.outbox),
                Of::Left(at) => drop(self.left[at].take(&mut self.buffer)), // goes by unheard
            }
        }
        self.left.retain(|pipe| !pipe.closed);
        if ended {
            self.reap();
        }
        let mut state = self.link.move_bytes(host);
        if state == State::Up {
            state = self.link.flush(); // first, so that requests that waited for room in it are not waited upon
        }
        if state == State::Up {
            self.answer_requests()?;
        }
        self.tend();
        if state == State::Up {
            state = self.link.flush();
        }
        if state == State::Changed {
            self.forget_host();
        }
        Ok(state)
    }

    fn waited_for(&self) -> (Vec<Of>, Vec<Poll>) {
        let mut polls = self.link.wanted();
        let mut of = vec![Of::Link; polls.len()];
        let mut add = |what, fd: &dyn AsRawFd, events| {
            of.push(what);
            polls.push(Poll { fd: fd.as_raw_fd(), events, found: 0 });
        };
        add(Of::Children, &self.children, POLLIN);
        let has_room = self.link.outbox.has_room();
        for (at, command) in self.commands.iter().enumerate() {
            for (which, pipe) in command.pipes.iter().enumerate() {
                if !pipe.is_done() && (has_room || command.muted) {
                    add(Of::Output(at, which), &pipe.file, POLLIN);
                }
            }
            if let Some(input) = command.input.as_ref().filter(|input| !input.waiting.is_empty()) {
                add(Of::Input(at), &input.pipe, POLLOUT);
            }
        }
        for (at, pipe) in self.left.iter().enumerate() {
            add(Of::Left(at), &pipe.file, POLLIN);
        }
        (of, polls)
    }

    fn patience_ms(&self) -> i32 {
        if self.transfers.has_more() && self.link.outbox.has_room() {
            return 0;
        }
        let now = Instant::now();
        let mut soonest = self.commands.iter().filter_map(|command| command.due(now)).min();
        if !self.freezing.is_empty() {
            soonest = Some(now + TICK);
        }
        if !self.link.is_connected() {
            soonest = Some(soonest.unwrap_or(now + HOST_LOOK).min(now + HOST_LOOK));
        }
        match soonest {
            None => -1,
            Some(when) => when.saturating_duration_since(now).as_micros().div_ceil(1000).min(1 << 30) as i32,
        }
    }

    fn reap(&mut self) {
        let mut events = [0; 1024];
        while self.children.read(&mut events).is_ok_and(|length| length == events.len()) {}
        while let Some((pid, status)) = sys::reap() {
            let Some(at) = self.commands.iter().position(|command| command.pid == pid) else { continue };
            match self.spawner.start_error_of(pid).filter(|_| !self.commands[at].muted) {
                None => self.commands[at].ended(status),
                Some((number, step)) => {
                    let command = self.commands.swap_remove(at);
                    self.refuse(command.id, number, step);
                }
            }
        }
    }

    fn answer_requests(&mut self) -> Result<(), Malformed> {
        while !self.link.outbox.is_full() {
            let Some(frame) = self.link.inbox.next_frame()? else { break };
            self.answer(frame)?;
        }
        Ok(())
    }

    fn answer(&mut self, frame: Frame) -> Result<(), Malformed> {
        let id = frame.id;
        match requests::parse(frame)? {
            Request::Run(run) => self.run(id, &run)?,
            Request::Input(data) => {
                if let Some(command) = self.commands.iter_mut().find(|command| command.id == id) {
                    command.feed(&data, &mut self.link.outbox)?;
                }
            }
            Request::Kill => {
                if let Some(command) = self.commands.iter_mut().find(|command| command.id == id) {
                    command.kill();
                }
            }
            Request::Freeze if self.freezing.len() < MAX_FREEZES => {
                self.frozen = true;
                self.freezing.push(id);
            }
            Request::Freeze => self.refuse(id, sys::EAGAIN, "too many wait for that"),
            Request::Renew { seed, clock_ns, host_name } => {
                self.forget_host();
                self.frozen = false; // its past was stopped for good, and this is another machine
                match self.identity.renew(&seed, clock_ns, &host_name) {
                    Ok(()) => self.link.outbox.put(b'k', id, &[]),
                    Err((step, error)) => self.refuse(id, error.raw_os_error().unwrap_or(0), step),
                }
            }
            Request::Ping => self.link.outbox.put(b'k', id, &[]),
            files => self.transfers.begin(id, files, &mut self.link.outbox)?,
        }
        Ok(())
    }

    fn run(&mut self, id: u32, run: &Run) -> Result<(), Malformed> {
        if self.commands.iter().any(|command| command.id == id) {
            return Err(Malformed("a command with the id of another"));
        }
        if self.frozen {
            self.refuse(id, sys::EPERM, "the machine is frozen");
        } else if self.commands.len() >= MAX_COMMANDS {
            self.refuse(id, sys::EAGAIN, "too many commands run");
        } else if let Some(user) = self.user(&run.user) {
            self.identity.prepare();
            match Command::start(id, run, &user, &mut self.spawner) {
                Ok(command) => {
                    if run.flags & APART != 0 {
                        self.link.outbox.put(b's', id, &[&command.pid.to_le_bytes()]);
                    }
                    self.commands.push(command);
                }
                Err(error) => self.answer_unstartable(id, &error),
            }
        } else {
            self.refuse(id, sys::EINVAL, "no such user");
        }
        Ok(())
    }

    fn user(&self, requested: &[u8]) -> Option<users::User> {
        let name = if requested.is_empty() { self.user.as_bytes() } else { requested };
        if name.is_empty() { users::find(sys::user_id().to_string().as_bytes()) } else { users::find(name) }
    }

    /// Report a command that could not be started: like a shell, if the machine is out of processes or memory.
    fn answer_unstartable(&mut self, id: u32, error: &io::Error) {
        let line = format!("cannot start a process: {}\n", sys::error_text(error));
        let out = &mut self.link.outbox;
        out.put(b'o', id, &[&[0], line.as_bytes()]);
        out.put(b'x', id, &[&126_i32.to_le_bytes(), &[0], &(line.len() as u64).to_le_bytes()]);
    }

    fn refuse(&mut self, id: u32, number: i32, why: &str) {
        self.link.outbox.put(b'e', id, &[&(number as u32).to_le_bytes(), why.as_bytes()]);
    }

    /// Periodic work that needs no request.
    fn tend(&mut self) {
        let now = Instant::now();
        for command in &mut self.commands {
            command.tend(now);
        }
        for over in self.commands.extract_if(.., |command| command.is_over()) {
            self.left.extend(over.finish(&mut self.link.outbox));
        }
        while self.left.len() > MAX_LEFT_PIPES {
            self.left.pop_front();
        }
        self.transfers.go_on(&mut self.buffer, &mut self.link.outbox);
        if !self.freezing.is_empty() && !processes::kill_all() && self.commands.is_empty() {
            for id in self.freezing.drain(..) {
                self.link.outbox.put(b'k', id, &[]);
            }
        }
    }

    /// Drop the requests of a host that disconnected.
    fn forget_host(&mut self) {
        for command in &mut self.commands {
            command.muted = true;
        }
        self.transfers.clear();
        self.freezing.clear();
    }
}
