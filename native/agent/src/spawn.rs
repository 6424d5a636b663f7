//! Starts the first process of a command: a fork of this small process, confined step by step, that then executes the
//! program.
//!
//! It is a fork and not a vfork: a program of the same user could stop a child that shares memory with this process,
//! and so this process. If a step fails that no program can have caused, the child reports it through a pipe that only
//! it and the agent have, and the command is refused. A missing program or folder is reported as output and exit code
//! 127 or 126, as in a shell.

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
const FIRST_MARK: u64 = 0x65_7475_6465_0000; // an unusual value, so that it identifies a command

/// The report of a child that could not be confined: its pid, the error number, and the step.
type StartError = [i32; 3];

/// The three standard streams of a command.
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
    error_reader: PipeReader,
    error_writer: PipeWriter,
    start_errors: Vec<StartError>, // reports of processes that were not reaped yet
}

impl Spawner {
    pub fn new(options: &Options) -> io::Result<Self> {
        let (error_reader, error_writer) = io::pipe()?;
        sys::set_blocking(error_reader.as_fd(), false)?;
        Ok(Self {
            limits: options.limits.clone(),
            cpus: options.cpus,
            path: options.path.clone(),
            work: options.work.clone(),
            root_capabilities: options.root_capabilities,
            is_root: sys::can_change_user(),
            mark: FIRST_MARK,
            error_reader,
            error_writer,
            start_errors: Vec::new(),
        })
    }

    /// Start a command as `user`. Returns its first process and the mark of its descendants (`processes`). Errors are
    /// those of the kernel, for lack of resources.
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
            self.report(std::process::id() as i32, step, &error);
            sys::exit_now(NOT_RUNNABLE);
        }
        if let Err(error) = sys::change_folder(&cwd) {
            fail(cwd.as_bytes(), &error, NOT_RUNNABLE);
        }
        execute(&candidates, &argv, &env)
    }

    /// Why process `pid` could not be confined, if it could not: the error number, and the step.
    pub fn start_error_of(&mut self, pid: i32) -> Option<(i32, &'static str)> {
        let mut record = [0; size_of::<StartError>()];
        while self.error_reader.read(&mut record).is_ok_and(|read| read == record.len()) {
            self.start_errors.push([0, 4, 8].map(|at| i32::from_le_bytes(std::array::from_fn(|i| record[at + i]))));
        }
        let at = self.start_errors.iter().position(|[whose, ..]| *whose == pid)?;
        let [_, error, step] = self.start_errors.swap_remove(at);
        Some((error, STEPS.get(step as usize).unwrap_or(&"confining")))
    }

    fn folder(&self, cwd: &[u8]) -> Vec<u8> {
        match cwd {
            [] => self.work.clone().into_bytes(),
            [b'/', ..] => cwd.to_vec(),
            _ => [self.work.trim_end_matches('/').as_bytes(), b"/", cwd].concat(),
        }
    }

    /// Runs in the child. The order matters: steps that need a privilege come before it is dropped.
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

    fn report(&self, pid: i32, step: usize, error: &io::Error) {
        let start_error: StartError = [pid, error.raw_os_error().unwrap_or(0), step as i32];
        let start_error = start_error.map(i32::to_le_bytes).concat();
        let _ = (&self.error_writer).write_all(&start_error); // short enough to be written atomically
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

/// The given variables, and those that every login has; PWD is the folder where the command starts.
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

/// The paths where a program may be, in order.
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

/// Execute the first candidate that can be run; a file without `#!` is run by the shell.
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
        _ => sys::error_text(error),
    };
    let line = [what, b": ", words.as_bytes(), b"\n"].concat();
    if let Ok(stderr) = sys::copy_above_standard(2) {
        let _ = File::from(stderr).write_all(&line); // the pipe may be closed
    }
    sys::exit_now(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options;

    #[test]
    fn commands_that_fail_together_each_have_their_own_error() {
        let options = options::parse(["--stdio".to_owned()]).unwrap();
        let mut spawner = Spawner::new(&options).unwrap();
        for (pid, step) in [(7, 1), (8, 5), (9, 3)] {
            spawner.report(pid, step, &sys::error(sys::EPERM));
        }
        assert_eq!(spawner.start_error_of(9), Some((sys::EPERM, STEPS[3])));
        assert_eq!(spawner.start_error_of(6), None);
        assert_eq!(spawner.start_error_of(7), Some((sys::EPERM, STEPS[1])));
        assert_eq!(spawner.start_error_of(8), Some((sys::EPERM, STEPS[5])));
        assert_eq!(spawner.start_error_of(8), None);
    }
}
