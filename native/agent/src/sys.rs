//! Safe functions with `io::Result` for the kernel calls that std does not wrap. All `unsafe` code of the crate is
//! here.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_short, c_uint, c_ulong, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

pub const SIGKILL: c_int = 9;
pub const SIGSTOP: c_int = 19;
pub const SIGCONT: c_int = 18;
const SIGCHLD: c_int = 17;
const CAUGHT: [c_int; 2] = [7, 11]; // by std, to report stack overflows; execve resets them

pub const EPERM: i32 = 1;
pub const ENOENT: i32 = 2;
pub const ENOEXEC: i32 = 8;
pub const EAGAIN: i32 = 11;
pub const ENOMEM: i32 = 12;
pub const EACCES: i32 = 13;
pub const EEXIST: i32 = 17;
pub const ENOTDIR: i32 = 20;
pub const EISDIR: i32 = 21;
pub const EINVAL: i32 = 22;
pub const ENFILE: i32 = 23;
pub const EMFILE: i32 = 24;
pub const EFBIG: i32 = 27;
pub const ENXIO: i32 = 6;
pub const ENAMETOOLONG: i32 = 36;
pub const ELOOP: i32 = 40;

pub const O_WRONLY: c_int = 1;
pub const O_RDWR: c_int = 2;
pub const O_CREAT: c_int = 0o100;
pub const O_NONBLOCK: c_int = 0o4000;
pub const O_PATH: c_int = 0o10000000;
const O_CLOEXEC: c_int = 0o2000000;
#[cfg(target_arch = "x86_64")]
pub const O_DIRECTORY: c_int = 0o200000;
#[cfg(target_arch = "x86_64")]
pub const O_NOFOLLOW: c_int = 0o400000;
#[cfg(not(target_arch = "x86_64"))]
pub const O_DIRECTORY: c_int = 0o40000;
#[cfg(not(target_arch = "x86_64"))]
pub const O_NOFOLLOW: c_int = 0o100000;

pub const NOSUID: u64 = 2;
pub const NODEV: u64 = 4;
pub const NOEXEC: u64 = 8;

pub const POLLIN: c_short = 1;
pub const POLLOUT: c_short = 4;
pub const POLLERR: c_short = 8;
pub const POLLHUP: c_short = 16;

const PR_SET_PDEATHSIG: c_int = 1;
const PR_SET_DUMPABLE: c_int = 4;
const PR_SET_CHILD_SUBREAPER: c_int = 36;
const PR_SET_NO_NEW_PRIVS: c_int = 38;
const PR_SET_SECCOMP: c_int = 22;
const PR_CAPBSET_DROP: c_int = 24;
const PR_SET_KEEPCAPS: c_int = 8;
const CAPABILITIES: [u32; 2] = [0x2008_0522, 0]; // version 3, of this process
#[cfg(target_arch = "x86_64")]
const RT_SIGACTION: c_long = 13;
#[cfg(target_arch = "x86_64")]
const CLONE: c_long = 56;
#[cfg(not(target_arch = "x86_64"))]
const CLONE: c_long = 220;
#[cfg(not(target_arch = "x86_64"))]
const RT_SIGACTION: c_long = 134;
const CLOSE_RANGE: c_long = 436; // the same on every architecture
const MOST_DESCRIPTORS: c_long = 65_536;
const FIONREAD: c_ulong = 0x541B;
const F_SETFD: c_int = 2;
const F_SETFL: c_int = 4;
const F_GETFL: c_int = 3;
const F_DUPFD_CLOEXEC: c_int = 1030;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Poll {
    pub fd: RawFd,
    pub events: c_short,
    pub found: c_short,
}

#[repr(C)]
struct SignalSet([u64; 16]);

unsafe extern "C" {
    fn fork() -> c_int;
    fn poll(fds: *mut Poll, count: c_ulong, timeout_ms: c_int) -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn waitid(kind: c_int, id: c_uint, info: *mut u64, options: c_int) -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
    fn fcntl(fd: c_int, command: c_int, ...) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    fn openat(dir: c_int, path: *const c_char, flags: c_int, ...) -> c_int;
    fn mkdirat(dir: c_int, path: *const c_char, mode: c_uint) -> c_int;
    fn symlinkat(target: *const c_char, dir: c_int, path: *const c_char) -> c_int;
    fn readlinkat(dir: c_int, path: *const c_char, buffer: *mut u8, length: usize) -> isize;
    fn getdents64(dir: c_int, buffer: *mut u8, length: usize) -> isize;
    fn prctl(option: c_int, ...) -> c_int;
    fn capset(header: *const u32, data: *const u32) -> c_int;
    fn capget(header: *const u32, data: *mut u32) -> c_int;
    fn getppid() -> c_int;
    fn setgroups(count: usize, groups: *const c_uint) -> c_int;
    fn setresuid(real: c_uint, effective: c_uint, saved: c_uint) -> c_int;
    fn setresgid(real: c_uint, effective: c_uint, saved: c_uint) -> c_int;
    fn setfsuid(user: c_uint) -> c_int;
    fn setfsgid(group: c_uint) -> c_int;
    fn geteuid() -> c_uint;
    fn getegid() -> c_uint;
    fn fchown(fd: c_int, user: c_uint, group: c_uint) -> c_int;
    fn setsid() -> c_int;
    fn umask(mask: c_uint) -> c_uint;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn execve(path: *const c_char, argv: *const *const c_char, env: *const *const c_char) -> c_int;
    fn _exit(code: c_int) -> !;
    fn chdir(path: *const c_char) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn close(fd: c_int) -> c_int;
    fn signal(number: c_int, handler: usize) -> usize;
    fn sigprocmask(how: c_int, set: *const SignalSet, old: *mut SignalSet) -> c_int;
    fn signalfd(fd: c_int, set: *const SignalSet, flags: c_int) -> c_int;
    fn prlimit(pid: c_int, resource: c_int, new: *const [u64; 2], old: *mut [u64; 2]) -> c_int;
    fn setrlimit(resource: c_int, limits: *const [u64; 2]) -> c_int;
    fn getrlimit(resource: c_int, limits: *mut [u64; 2]) -> c_int;
    fn mount(from: *const c_char, to: *const c_char, kind: *const c_char, flags: c_ulong, data: *const c_char)
    -> c_int;
    fn unshare(flags: c_int) -> c_int;
    fn setns(fd: c_int, kind: c_int) -> c_int;
    fn recvmsg(socket: c_int, message: *mut Message, flags: c_int) -> isize;
    fn send(socket: c_int, bytes: *const u8, length: usize, flags: c_int) -> isize;
    fn sethostname(name: *const u8, length: usize) -> c_int;
    fn clock_settime(clock: c_int, time: *const [i64; 2]) -> c_int;
    fn reboot(how: c_int) -> c_int;
    fn sync();
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Create an error with this number.
pub fn error(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Convert bytes to a C string. (What came over the channel was checked for NUL; names from the kernel have none.)
pub fn text(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| error(EINVAL))
}

/// Wait until a descriptor is ready; -1: no limit. After an interruption, nothing counts as ready.
pub fn wait(fds: &mut [Poll], timeout_ms: c_int) {
    // SAFETY: the pointer and the count are those of one slice.
    if unsafe { poll(fds.as_mut_ptr(), fds.len() as c_ulong, timeout_ms) } < 0 {
        for fd in fds {
            fd.found = 0;
        }
    }
}

/// Fork. Returns 0 in the child, and the child's pid in the parent. The process has one thread, so the child may do
/// anything.
pub fn fork_process() -> io::Result<i32> {
    // SAFETY: no other thread exists whose locks could be held.
    check(unsafe { fork() })
}

/// A child that has ended, with its wait status.
pub fn reap() -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: `status` outlives the call. 1 is WNOHANG.
    let pid = unsafe { waitpid(-1, &mut status, 1) };
    (pid > 0).then_some((pid, status))
}

/// Whether this process has children, alive or not yet reaped.
pub fn has_children() -> bool {
    const ANY: c_int = 0x0100_0005; // WNOWAIT, WEXITED, WNOHANG
    let mut info = [0_u64; 16];
    // SAFETY: the array is as large as `siginfo_t` and outlives the call; 0 is P_ALL.
    check(unsafe { waitid(0, 0, info.as_mut_ptr(), ANY) }).is_ok()
}

pub fn send_signal(pid: i32, number: c_int) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { kill(pid, number) }).map(drop)
}

/// The exit code for a wait status: 128 + signal if the process was killed.
pub fn exit_code(status: i32) -> i32 {
    if status & 0x7f == 0 { status >> 8 & 0xff } else { 128 + (status & 0x7f) }
}

pub fn set_blocking(fd: BorrowedFd<'_>, blocking: bool) -> io::Result<()> {
    // SAFETY: fcntl with integer arguments only.
    unsafe {
        let flags = check(fcntl(fd.as_raw_fd(), F_GETFL))?;
        let flags = if blocking { flags & !O_NONBLOCK } else { flags | O_NONBLOCK };
        check(fcntl(fd.as_raw_fd(), F_SETFL, flags)).map(drop)
    }
}

/// Take ownership of an inherited descriptor; it is not inherited further.
pub fn take_over(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: 1 is FD_CLOEXEC; the caller names a descriptor that nothing else owns.
    unsafe {
        check(fcntl(fd, F_SETFD, 1))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Duplicate a descriptor to a number of at least 3.
pub fn copy_above_standard(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a fresh descriptor is owned by nobody else.
    unsafe { Ok(OwnedFd::from_raw_fd(check(fcntl(fd, F_DUPFD_CLOEXEC, 3))?)) }
}

/// Duplicate `from` to descriptor `to` (0, 1 or 2), which is inherited.
pub fn put_at(from: &impl AsRawFd, to: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { dup2(from.as_raw_fd(), to) }).map(drop)
}

/// The number of bytes in a pipe.
pub fn bytes_waiting(fd: &impl AsRawFd) -> usize {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { ioctl(fd.as_raw_fd(), FIONREAD, &mut count as *mut c_int) };
    if result < 0 { 0 } else { count.max(0) as usize }
}

pub fn open_at(dir: BorrowedFd<'_>, path: &CStr, flags: c_int, mode: u32) -> io::Result<OwnedFd> {
    // SAFETY: the path is NUL-terminated; a fresh descriptor is owned by nobody else.
    unsafe { Ok(OwnedFd::from_raw_fd(check(openat(dir.as_raw_fd(), path.as_ptr(), flags | O_CLOEXEC, mode))?)) }
}

pub fn make_folder_at(dir: BorrowedFd<'_>, path: &CStr, mode: u32) -> io::Result<()> {
    // SAFETY: the path is NUL-terminated.
    check(unsafe { mkdirat(dir.as_raw_fd(), path.as_ptr(), mode) }).map(drop)
}

pub fn link_at(target: &CStr, dir: BorrowedFd<'_>, path: &CStr) -> io::Result<()> {
    // SAFETY: both are NUL-terminated.
    check(unsafe { symlinkat(target.as_ptr(), dir.as_raw_fd(), path.as_ptr()) }).map(drop)
}

/// The target of a link.
pub fn read_link_at(dir: BorrowedFd<'_>, path: &CStr) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 4096];
    // SAFETY: the buffer has the stated length.
    let length = unsafe { readlinkat(dir.as_raw_fd(), path.as_ptr(), buffer.as_mut_ptr(), buffer.len()) };
    if length < 0 {
        return Err(io::Error::last_os_error());
    }
    buffer.truncate(length as usize);
    Ok(buffer)
}

/// The names in an open folder, without `.` and `..`.
pub fn names_in(dir: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    const NAME: usize = 19; // where a name begins in a record of the kernel's
    let (mut names, mut buffer) = (Vec::new(), [0_u8; 8192]);
    loop {
        // SAFETY: the buffer has the stated length.
        let length = unsafe { getdents64(dir.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) };
        if length < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut records = &buffer[..length as usize];
        if records.is_empty() {
            return Ok(names);
        }
        while records.len() > NAME {
            let size = usize::from(u16::from_le_bytes([records[16], records[17]])).clamp(NAME, records.len());
            let name = CStr::from_bytes_until_nul(&records[NAME..size]).unwrap_or(c".");
            if name != c"." && name != c".." {
                names.push(name.to_owned());
            }
            records = &records[size..];
        }
    }
}

/// Set whether other processes of the same user can inspect this process and write its `/proc` files.
pub fn show_memory(shown: bool) {
    // SAFETY: integers only.
    unsafe { prctl(PR_SET_DUMPABLE, shown as c_ulong) };
}

/// Close every descriptor from 3 on except these: the creator of this process may have leaked more.
pub fn close_all_but(keep: &[RawFd]) {
    let mut keep: Vec<RawFd> = keep.iter().copied().filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    let mut from: c_long = 3;
    for fd in keep.into_iter().map(c_long::from).chain([c_long::from(u32::MAX)]) {
        // SAFETY: nothing in this process has been opened yet, so no descriptor of another owner is closed.
        unsafe {
            if from < fd && syscall(CLOSE_RANGE, from, fd - 1, 0 as c_long) < 0 {
                for old in from..fd.min(MOST_DESCRIPTORS) {
                    close(old as c_int); // on kernels without that call
                }
            }
        }
        from = fd + 1;
    }
}

/// Set the process name that lists of processes show.
pub fn be_called(name: &CStr) {
    // SAFETY: the name is NUL-terminated and outlives the call. PR_SET_NAME.
    unsafe { prctl(15, name.as_ptr()) };
}

/// Become a child subreaper: orphaned descendants become children of this process. Survives execve.
pub fn adopt_orphans() -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { prctl(PR_SET_CHILD_SUBREAPER, 1 as c_ulong) }).map(drop)
}

pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { prctl(PR_SET_PDEATHSIG, SIGKILL as c_ulong) }).map(drop)
}

pub fn no_new_privileges() -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { prctl(PR_SET_NO_NEW_PRIVS, 1 as c_ulong, 0 as c_ulong, 0 as c_ulong, 0 as c_ulong) }).map(drop)
}

/// Drop capabilities outside of `mask` from the bounding set. Best effort: that needs a capability itself.
pub fn bound_capabilities(mask: u64) {
    // SAFETY: integers only. Past the last capability of this kernel the call fails.
    unsafe {
        for capability in 0..64 {
            if mask >> capability & 1 == 0 && prctl(PR_CAPBSET_DROP, capability as c_ulong) < 0 {
                break;
            }
        }
    }
}

/// Keep the permitted capabilities after a change of user, until the next execve.
pub fn keep_over_change_of_user() -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { prctl(PR_SET_KEEPCAPS, 1 as c_ulong) }).map(drop)
}

/// Set the effective and permitted capabilities; none is inherited.
pub fn hold_capabilities(effective: u64, permitted: u64) -> io::Result<()> {
    let low_high = |mask: u64| (mask as u32, (mask >> 32) as u32);
    let ((low_e, high_e), (low_p, high_p)) = (low_high(effective), low_high(permitted));
    // SAFETY: version 3 takes two words of header and six of data.
    check(unsafe { capset(CAPABILITIES.as_ptr(), [low_e, low_p, 0, high_e, high_p, 0].as_ptr()) }).map(drop)
}

/// The permitted capabilities of this process.
pub fn permitted_capabilities() -> u64 {
    let mut data = [0_u32; 6];
    // SAFETY: as above.
    let result = unsafe { capget(CAPABILITIES.as_ptr(), data.as_mut_ptr()) };
    if result < 0 { 0 } else { u64::from(data[4]) << 32 | u64::from(data[1]) }
}

/// Whether commands can run as another user than this process.
pub fn can_change_user() -> bool {
    const SET_GID_AND_UID: u64 = 1 << 6 | 1 << 7;
    permitted_capabilities() & SET_GID_AND_UID == SET_GID_AND_UID
}

pub fn parent_id() -> i32 {
    // SAFETY: cannot fail.
    unsafe { getppid() }
}

pub const CPU: c_int = 0;

/// The number of a resource limit, by its name.
pub fn resource(name: &str) -> Option<c_int> {
    const NAMES: [&str; 16] = [
        "cpu",
        "fsize",
        "data",
        "stack",
        "core",
        "rss",
        "nproc",
        "nofile",
        "memlock",
        "as",
        "locks",
        "sigpending",
        "msgqueue",
        "nice",
        "rtprio",
        "rttime",
    ];
    NAMES.iter().position(|known| *known == name).map(|number| number as c_int)
}

/// The kernel's text for an error, without its number.
pub fn error_text(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Install a seccomp filter for this process and its descendants. `program`: eight bytes per instruction.
pub fn filter_calls(program: &[u8]) -> io::Result<()> {
    #[repr(C)]
    struct Program {
        length: u16,
        instructions: *const u8,
    }
    let length = u16::try_from(program.len() / 8).map_err(|_| error(EINVAL))?;
    let program = Program { length, instructions: program.as_ptr() };
    // SAFETY: 2 is SECCOMP_MODE_FILTER; the structure and what it points to outlive the call, which copies both.
    check(unsafe { prctl(PR_SET_SECCOMP, 2 as c_ulong, &program as *const Program, 0 as c_ulong, 0 as c_ulong) })
        .map(drop)
}

pub fn user_id() -> u32 {
    // SAFETY: cannot fail.
    unsafe { geteuid() }
}

pub fn group_id() -> u32 {
    // SAFETY: cannot fail.
    unsafe { getegid() }
}

/// Drop supplementary groups, if privileged.
pub fn leave_groups() -> io::Result<()> {
    // SAFETY: no groups, no pointer.
    check(unsafe { setgroups(0, std::ptr::null()) }).map(drop)
}

pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: integers only.
    unsafe {
        check(setresgid(gid, gid, gid))?;
        check(setresuid(uid, uid, uid)).map(drop)
    }
}

/// Access files as this user, until the next call. Drops root's file capabilities, and restores them.
pub fn act_on_files_as(uid: u32, gid: u32) {
    // SAFETY: integers only. The order lets root leave and come back.
    unsafe {
        setfsgid(gid);
        setfsuid(uid);
        if setfsuid(NOBODY) as u32 == uid {
            return; // it says who it was before, and changes nothing for a number that is none
        }
        let kept = NOBODY; // gVisor has none of it: be another in all but the real user, who can come back
        if uid == 0 {
            setresuid(kept, uid, kept);
        }
        setresgid(kept, gid, kept);
        if uid != 0 {
            setresuid(kept, uid, kept);
        }
    }
}

pub fn give_to(fd: &impl AsRawFd, uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { fchown(fd.as_raw_fd(), uid, gid) }).map(drop)
}

pub fn new_session() {
    // SAFETY: cannot fail in a fresh child.
    unsafe { setsid() };
}

pub fn set_umask(mask: u32) {
    // SAFETY: cannot fail.
    unsafe { umask(mask) };
}

pub fn change_folder(path: &CStr) -> io::Result<()> {
    // SAFETY: the path is NUL-terminated.
    check(unsafe { chdir(path.as_ptr()) }).map(drop)
}

/// Those that tools could send.
const IGNORED: [c_int; 16] = [1, 2, 3, 10, 12, 13, 14, 15, 21, 22, 24, 25, 26, 27, 29, 30];

fn handle_by_default(signals: impl Iterator<Item = c_int>) {
    let default = [0_u64; 4]; // the kernel's `struct sigaction`; 0 is SIG_DFL
    for number in signals {
        // SAFETY: the structure is larger than any kernel reads, and outlives the call. libc would keep two to itself.
        unsafe { syscall(RT_SIGACTION, c_long::from(number), default.as_ptr(), 0 as c_long, 8 as c_long) };
    }
}

/// In a child: reset signals to those of a new process: default handlers, none blocked.
pub fn reset_signals() {
    handle_by_default(IGNORED.into_iter());
    // SAFETY: the set is empty and outlives the call. 2 is SIG_SETMASK.
    unsafe { sigprocmask(2, &SignalSet([0; 16]), std::ptr::null_mut()) };
}

/// Ignore the signals that programs could send. (The creator of this process may have ignored others.)
pub fn ignore_signals() -> io::Result<()> {
    handle_by_default((1..=64).filter(|number| !CAUGHT.contains(number)));
    // SAFETY: 1 is SIG_IGN, 0 is SIG_BLOCK; the set outlives the call.
    unsafe {
        for number in IGNORED {
            signal(number, 1);
        }
        check(sigprocmask(0, &children_ended(), std::ptr::null_mut())).map(drop)
    }
}

/// A descriptor that is readable when a child has ended. Call it after `ignore_signals`.
pub fn ended_children() -> io::Result<File> {
    // SAFETY: the set outlives the call; the descriptor is fresh.
    unsafe { Ok(File::from_raw_fd(check(signalfd(-1, &children_ended(), O_NONBLOCK | O_CLOEXEC))?)) }
}

fn children_ended() -> SignalSet {
    let mut set = SignalSet([0; 16]);
    set.0[0] = 1 << (SIGCHLD - 1);
    set
}

/// Set a resource limit, to at most its current hard limit.
pub fn limit(resource: c_int, value: u64) -> io::Result<()> {
    let mut limits = [0_u64; 2];
    // SAFETY: the array is `struct rlimit`.
    unsafe {
        check(getrlimit(resource, &mut limits))?;
        let value = value.min(limits[1]);
        check(setrlimit(resource, &[value, value])).map(drop)
    }
}

const NOBODY: c_uint = c_uint::MAX;

/// The limit that marks the descendants of a command: the maximum size of core files, which a machine does not write.
pub const MARK: c_int = 4;

/// The mark of a process; None if it cannot be read.
pub fn mark_of(pid: i32) -> Option<u64> {
    let mut limits = [0_u64; 2];
    // SAFETY: the array is `struct rlimit64`; nothing is set.
    check(unsafe { prlimit(pid, MARK, std::ptr::null(), &mut limits) }).ok()?;
    Some(limits[1])
}

/// Whether process 2 is the parent of the kernel threads: it has no program.
pub fn has_kernel_threads() -> bool {
    std::fs::read("/proc/2/cmdline").is_ok_and(|words| words.is_empty())
        && std::fs::read("/proc/2/stat").is_ok_and(|stat| stat.starts_with(b"2 (kthreadd) "))
}

/// Execute another program. Returns only an error.
pub fn become_program(path: &CStr, argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const c_char> {
        list.iter().map(|word| word.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: both arrays end with a null pointer and point to NUL-terminated strings that are alive.
    unsafe { execve(path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

pub fn exit_now(code: c_int) -> ! {
    // SAFETY: never returns.
    unsafe { _exit(code) }
}

pub fn mount_at(from: &CStr, to: &CStr, kind: &CStr, flags: u64, data: &CStr) -> io::Result<()> {
    // SAFETY: all are NUL-terminated.
    check(unsafe { mount(from.as_ptr(), to.as_ptr(), kind.as_ptr(), flags, data.as_ptr()) }).map(drop)
}

/// Unshare the control group namespace.
pub fn leave_control_groups_namespace() -> io::Result<()> {
    // SAFETY: integers only. CLONE_NEWCGROUP.
    check(unsafe { unshare(0x0200_0000) }).map(drop)
}

pub const USERS: c_int = 0x1000_0000;
/// The kinds of namespace that a machine has, in addition to `USERS` and PIDs.
pub const NAMESPACES: [(&str, c_int); 4] =
    [("mnt", 0x0002_0000), ("net", 0x4000_0000), ("ipc", 0x0800_0000), ("uts", 0x0400_0000)];

/// Enter one namespace; or, if the descriptor is that of a process, its namespaces of these kinds.
pub fn enter_namespaces(of: &impl AsRawFd, kinds: c_int) -> io::Result<()> {
    // SAFETY: integers only.
    check(unsafe { setns(of.as_raw_fd(), kinds) }).map(drop)
}

/// Like `fork_process`, but the child is a child of this process's parent, and the first of a new PID namespace.
pub fn clone_first_process() -> io::Result<i32> {
    const NEW_PIDS_AND_PARENT: c_long = 0x2000_0000 | 0x8000;
    let (flags, none) = (NEW_PIDS_AND_PARENT | c_long::from(SIGCHLD), 0 as c_long);
    // SAFETY: no memory is shared and no stack given; no other thread exists whose locks could be held.
    let pid = unsafe { syscall(CLONE, flags, none, none, none, none) };
    check(pid as c_int)
}

#[repr(C)]
struct Piece {
    start: *mut c_void,
    length: usize,
}

#[repr(C)]
struct Message {
    name: *mut c_void,
    name_length: c_uint,
    pieces: *mut Piece,
    num_pieces: usize,
    control: *mut c_void,
    control_length: usize,
    flags: c_int,
}

/// Bring up the loopback interface, with any socket of its family.
pub fn bring_up_loopback(socket: &impl AsRawFd) -> io::Result<()> {
    const SIOCSIFFLAGS: c_ulong = 0x8914;
    let mut request = [0_u8; 40];
    request[..2].copy_from_slice(b"lo");
    request[16..18].copy_from_slice(&1_i16.to_ne_bytes()); // IFF_UP
    // SAFETY: the array is `struct ifreq`: a name of 16 bytes, then the flags.
    check(unsafe { ioctl(socket.as_raw_fd(), SIOCSIFFLAGS, request.as_ptr() as *const c_void) }).map(drop)
}

/// Receive the descriptors of one packet (at most 8); None at the end of the socket. They are not inherited further.
pub fn receive_descriptors(socket: &impl AsRawFd) -> io::Result<Option<Vec<OwnedFd>>> {
    const HEAD: usize = 16; // of a control message: its length, then level 1 (SOL_SOCKET) and type 1 (SCM_RIGHTS)
    let (mut byte, mut control) = (0_u8, [0_u64; 6]); // one such message, aligned
    let mut piece = Piece { start: (&raw mut byte).cast(), length: 1 };
    let mut message = Message {
        name: std::ptr::null_mut(),
        name_length: 0,
        pieces: &mut piece,
        num_pieces: 1,
        control: control.as_mut_ptr().cast(),
        control_length: size_of_val(&control),
        flags: 0,
    };
    // SAFETY: every pointer is to a local of the stated length. MSG_CMSG_CLOEXEC.
    let length = unsafe { recvmsg(socket.as_raw_fd(), &mut message, 0x4000_0000) };
    if length < 0 {
        return Err(io::Error::last_os_error());
    }
    let bytes: Vec<u8> = control.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let end = usize::from_ne_bytes(std::array::from_fn(|i| bytes[i])).min(message.control_length);
    let fds = bytes[..end].get(HEAD..).unwrap_or_default().chunks_exact(4);
    // SAFETY: the kernel has just made them for this process, and nobody else owns them.
    let fds = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes([fd[0], fd[1], fd[2], fd[3]])) });
    let fds: Vec<OwnedFd> = fds.collect();
    Ok((length > 0).then_some(fds))
}

/// Send one packet with a number.
pub fn send_number(socket: &impl AsRawFd, number: i32) -> io::Result<()> {
    let bytes = number.to_ne_bytes();
    // SAFETY: pointer and length are those of one array. MSG_NOSIGNAL.
    let sent = unsafe { send(socket.as_raw_fd(), bytes.as_ptr(), bytes.len(), 0x4000) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub fn set_host_name(name: &[u8]) -> io::Result<()> {
    // SAFETY: pointer and length are those of one slice.
    check(unsafe { sethostname(name.as_ptr(), name.len()) }).map(drop)
}

/// Set the time, in nanoseconds since 1970.
pub fn set_clock(ns: u64) -> io::Result<()> {
    let time = [(ns / 1_000_000_000) as i64, (ns % 1_000_000_000) as i64];
    // SAFETY: the array is `struct timespec`; 0 is CLOCK_REALTIME.
    check(unsafe { clock_settime(0, &time) }).map(drop)
}

/// Increase the uptime that processes started from now on see.
pub fn have_clocks_ahead(seconds: u64) -> io::Result<()> {
    // SAFETY: integers only. CLONE_NEWTIME.
    check(unsafe { unshare(0x80) })?;
    std::fs::write("/proc/self/timens_offsets", format!("monotonic {seconds} 0\nboottime {seconds} 0\n"))
}

/// Mix 32 bytes into the kernel's random pool and reseed every generator.
pub fn reseed(pool: &File, seed: &[u8; 32]) -> io::Result<()> {
    const ADD: c_ulong = 0x4008_5203; // RNDADDENTROPY
    const RESEED: c_ulong = 0x5207; // RNDRESEEDCRNG
    let mut packed = [0_u8; 40];
    packed[..4].copy_from_slice(&256_i32.to_ne_bytes()); // bits
    packed[4..8].copy_from_slice(&32_i32.to_ne_bytes()); // bytes
    packed[8..].copy_from_slice(seed);
    // SAFETY: the array is `struct rand_pool_info` with its 32 bytes.
    unsafe {
        check(ioctl(pool.as_raw_fd(), ADD, packed.as_ptr() as *const c_void))?;
        check(ioctl(pool.as_raw_fd(), RESEED, 0 as c_long)).map(drop)
    }
}

/// Power off a virtual machine.
pub fn power_off() {
    // SAFETY: integers only.
    unsafe {
        sync();
        reboot(0x4321_fedc);
    }
}

/// Keep a descriptor open for the lifetime of the process.
pub fn keep_open(fd: OwnedFd) {
    let _ = fd.into_raw_fd();
}
