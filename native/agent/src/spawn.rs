//! A command's first process: a fork of this small one, confined step by step, that becomes the program.
//!
//! A fork, not a vfork: a child that shared this memory could be stopped by a tool of the same user, and this process
//! with it. Where a step fails that no tool can have caused, the child says so through a pipe that only it and the agent
//! hold, and the command is refused; a missing program or folder is output and exit code 127 or 126, as in a shell.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use crate::options::Options;
use crate::requests::Run;
use crate::sys;
use crate::users::User;

const NOT_RUNNABLE: i32 = 126;
const NOT_FOUND: i32 = 127;
const FIRST_MARK: u64 = 0x65_7475_6465_0000; // no size that anybody would ask for

/// What the child writes when it could not be confined: its number, the error's, the step's.
type Trouble = [i32; 3];

/// The three standard streams of a command, its own ends.
pub struct Streams {
    pub stdin: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

/// Starts commands.
pub struct Spawner {
    limits: Vec<(i32, u64)>,
    cpus: Option<u64>,
    path: String,
    work: String,
    root_capabilities: u64,
    is_root: bool,
    mark: u64, // of the last command
    heard: PipeReader,
    told: PipeWriter,
    troubles: Vec<Trouble>, // of those whose end is still to be noticed
}

impl Spawner {
    pub fn new(options: &Options) -> io::Result<Self> {
        let (heard, told) = io::pipe()?;
        sys::set_blocking(heard.as_fd(), false)?;
        Ok(Self {
            limits: options.limits.clone(),
            cpus: options.cpus,
            path: options.path.clone(),
            work: options.work.clone(),
            root_capabilities: options.root_capabilities,
            is_root: sys::can_change_user(),
            mark: FIRST_MARK,
            heard,
            told,
            troubles: Vec::new(),
        })
    }

    /// Start a command as `user`; its first process, and the mark of all that it starts (`processes`). Errors are the
    /// kernel's, for want of something.
    pub fn spawn(&mut self, run: &Run, user: &User, streams: &Streams) -> io::Result<(i32, u64)> {
        let cwd = self.folder(&run.cwd);
        let env = environment(run, user, &cwd, &self.path);
        let argv = run.argv.iter().map(|word| sys::text(word)).collect::<io::Result<Vec<_>>>()?;
        let cwd = sys::text(&cwd)?;
        let candidates = candidates(&run.argv[0], &env);
        let env = env.iter().map(|word| sys::text(word)).collect::<io::Result<Vec<_>>>()?;
        self.mark += 1;
        let pid = sys::fork_process()?;
        if pid > 0 {
            return Ok((pid, self.mark));
        }
        if let Err((step, error)) = self.confine(run, user, streams) {
            self.tell(std::process::id() as i32, step, &error);
            sys::exit_now(NOT_RUNNABLE);
        }
        if let Err(error) = sys::change_folder(&cwd) {
            fail(cwd.as_bytes(), &error, NOT_RUNNABLE);
        }
        execute(&candidates, &argv, &env)
    }

    /// Why the process that was `pid` could not be confined, if so: the error's number, and the step in words.
    pub fn trouble_of(&mut self, pid: i32) -> Option<(i32, &'static str)> {
        let mut told = [0; size_of::<Trouble>()];
        while self.heard.read(&mut told).is_ok_and(|read| read == told.len()) {
            self.troubles.push([0, 4, 8].map(|at| i32::from_le_bytes(std::array::from_fn(|i| told[at + i]))));
        }
        let at = self.troubles.iter().position(|[whose, ..]| *whose == pid)?;
        let [_, error, step] = self.troubles.swap_remove(at);
        Some((error, STEPS.get(step as usize).unwrap_or(&"confining")))
    }

    fn folder(&self, cwd: &[u8]) -> Vec<u8> {
        match cwd {
            [] => self.work.clone().into_bytes(),
            [b'/', ..] => cwd.to_vec(),
            _ => [self.work.trim_end_matches('/').as_bytes(), b"/", cwd].concat(),
        }
    }

    /// In the child. The order matters: what needs a privilege comes before it is dropped.
    fn confine(&self, run: &Run, user: &User, streams: &Streams) -> Result<(), (usize, io::Error)> {
        let at = |step: usize| move |error| (step, error);
        sys::new_session();
        sys::put_at(&streams.stdin, 0).map_err(at(0))?;
        sys::put_at(&streams.stdout, 1).map_err(at(0))?;
        sys::put_at(&streams.stderr, 2).map_err(at(0))?;
        sys::reset_signals();
        sys::set_umask(0o022);
        sys::show_memory(true); // of this fork, while it is still the agent's user: or /proc would not be its own
        let _ = fs::write("/proc/self/oom_score_adj", "1000"); // a machine may have no /proc
        sys::show_memory(false);
        for (resource, value) in &self.limits {
            sys::limit(*resource, *value).map_err(at(1))?;
        }
        if let Some(cpus) = self.cpus {
            sys::limit(sys::CPU, u64::from(run.deadline_ms) * cpus / 1000 + 2).map_err(at(1))?;
        }
        if sys::adopt_orphans().is_err() {
            sys::limit(sys::MARK, self.mark).map_err(at(2))?;
        }
        if self.is_root {
            let keep = if user.uid == 0 { self.root_capabilities } else { 0 };
            let _ = sys::leave_groups(); // a user namespace may forbid it, and then there are none
            sys::keep_over_change_of_user().map_err(at(3))?;
            sys::become_user(user.uid, user.gid).map_err(at(3))?;
            let keep = keep & sys::permitted_capabilities();
            sys::hold_capabilities(keep, keep).map_err(at(4))?;
        }
        sys::no_new_privileges().map_err(at(5))?;
        if std::process::id() != 1 && sys::parent_id() != 1 {
            sys::die_with_parent().map_err(at(6))?;
        }
        Ok(())
    }

    fn tell(&self, pid: i32, step: usize, error: &io::Error) {
        let trouble: Trouble = [pid, error.raw_os_error().unwrap_or(0), step as i32];
        let trouble = trouble.map(i32::to_le_bytes).concat();
        let _ = (&self.told).write_all(&trouble); // short enough to be written in one piece
    }
}

const STEPS: [&str; 7] = [
    "connecting a command's streams",
    "bounding a command",
    "having a command adopt its orphans",
    "becoming the command's user",
    "dropping capabilities",
    "refusing new privileges",
    "tying a command's life to the agent's",
];

/// What was given, and what every login has; PWD is where the command starts.
fn environment(run: &Run, user: &User, cwd: &[u8], path: &str) -> Vec<Vec<u8>> {
    let mut env = run.env.clone();
    let usual = [("PATH", path.as_bytes()), ("HOME", &user.home), ("USER", &user.name), ("PWD", cwd)];
    for (name, value) in usual {
        let prefix = [name.as_bytes(), b"="].concat();
        if !env.iter().any(|variable| variable.starts_with(&prefix)) && !value.contains(&0) {
            env.push([&prefix, value].concat());
        }
    }
    env
}

/// The paths at which a program may be, in order.
fn candidates(program: &[u8], env: &[Vec<u8>]) -> Vec<CString> {
    let found: Vec<Vec<u8>> = if program.is_empty() {
        Vec::new()
    } else if program.contains(&b'/') {
        vec![program.to_vec()]
    } else {
        let path = env.iter().find_map(|variable| variable.strip_prefix(b"PATH=")).unwrap_or_default();
        let folders = path.split(|byte| *byte == b':').map(|f| if f.is_empty() { b"." } else { f });
        folders.map(|folder| [folder, b"/", program].concat()).collect()
    };
    found.iter().filter_map(|path| sys::text(path).ok()).collect()
}

/// Become the first candidate that can be run; a file without `#!` is a script of the shell's.
fn execute(candidates: &[CString], argv: &[CString], env: &[CString]) -> ! {
    let mut why = sys::error(sys::ENOENT);
    for path in candidates {
        let error = sys::become_program(path, argv, env);
        match error.raw_os_error() {
            Some(sys::ENOENT | sys::ENOTDIR) => {}
            Some(sys::ENOEXEC) => {
                let script: Vec<CString> =
                    [c"sh".to_owned(), path.clone()].into_iter().chain(argv[1..].iter().cloned()).collect();
                why = sys::become_program(c"/bin/sh", &script, env);
                break;
            }
            Some(sys::EACCES) => why = error,
            _ => {
                why = error;
                break;
            }
        }
    }
    let code = if why.raw_os_error() == Some(sys::ENOENT) { NOT_FOUND } else { NOT_RUNNABLE };
    fail(argv[0].as_bytes(), &why, code)
}

fn fail(what: &[u8], error: &io::Error, code: i32) -> ! {
    let words = match error.raw_os_error() {
        Some(sys::ENOENT) if code == NOT_FOUND => "not found".to_owned(),
        _ => sys::words(error),
    };
    let line = [what, b": ", words.as_bytes(), b"\n"].concat();
    if let Ok(stderr) = sys::copy_above_standard(2) {
        let _ = File::from(stderr).write_all(&line); // nobody may listen
    }
    sys::exit_now(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options;

    #[test]
    fn commands_that_fail_together_each_have_their_own_trouble() {
        let options = options::parse(["--stdio".to_owned()]).unwrap();
        let mut spawner = Spawner::new(&options).unwrap();
        for (pid, step) in [(7, 1), (8, 5), (9, 3)] {
            spawner.tell(pid, step, &sys::error(sys::EPERM));
        }
        assert_eq!(spawner.trouble_of(9), Some((sys::EPERM, STEPS[3])));
        assert_eq!(spawner.trouble_of(6), None);
        assert_eq!(spawner.trouble_of(7), Some((sys::EPERM, STEPS[1])));
        assert_eq!(spawner.trouble_of(8), Some((sys::EPERM, STEPS[5])));
        assert_eq!(spawner.trouble_of(8), None);
    }
}
