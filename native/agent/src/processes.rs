//! Finds and kills trees of processes.
//!
//! The first process of every command adopts the orphans below it (child subreaper), so all of its descendants,
//! daemonised or not, are below it while it lives. To kill a tree: stop its root, kill everything below until two scans
//! find nothing alive, then kill the root. If a root gives up adopting (`prctl`), what it daemonises is adopted by the
//! machine's first process and lives until the machine is frozen or ends. On kernels without subreapers (gVisor before
//! 2023), all descendants of a command inherit a mark (a resource limit without other effect) and are found by that.
//! Reads `/proc/*/stat`, which every kernel and gVisor have.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use crate::sys;

const KERNEL_THREADS: i32 = 2; // pid of their parent, in a virtual machine
const QUIET_LOOKS: u32 = 2;
const MOST_LOOKS: u32 = 200; // scans while freezing
const LOOK_AGAIN: Duration = Duration::from_micros(200);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    pub parent: i32,
    pub born: u64,   // in ticks since boot; together with the pid, it identifies a process uniquely
    pub alive: bool, // any thread of it
    pub moves: bool, // alive and not stopped
}

/// All visible processes.
pub fn all() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter_map(|pid| parse(pid, &fs::read(format!("/proc/{pid}/stat")).ok()?)).collect()
}

/// Parse one line of `/proc/PID/stat`. The program can choose the name in it; it ends at the last parenthesis.
pub fn parse(pid: i32, stat: &[u8]) -> Option<Process> {
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let fields: Vec<&str> = std::str::from_utf8(&stat[after..]).ok()?.split_ascii_whitespace().collect();
    let parent = fields.get(1)?.parse().ok()?;
    let threads: i64 = fields.get(17)?.parse().ok()?; // a dead first thread may have living siblings
    let born = fields.get(19)?.parse().ok()?;
    let dead = matches!(*fields.first()?, "Z" | "X" | "x");
    let stopped = matches!(*fields.first()?, "T" | "t");
    let alive = !dead || threads > 1;
    Some(Process { pid, parent, born, alive, moves: alive && !stopped })
}

/// The descendants of `roots`, without the roots.
pub fn below(roots: &[i32], processes: &[Process]) -> Vec<Process> {
    let mut children: HashMap<i32, Vec<Process>> = HashMap::new();
    for process in processes {
        children.entry(process.parent).or_default().push(*process);
    }
    let (mut found, mut next) = (Vec::new(), roots.to_vec());
    while let Some(parent) = next.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            next.push(child.pid);
            found.push(child);
        }
    }
    found
}

/// Kills the tree of one command, one scan per step. Remembers every process seen, so that a root killed by its own
/// descendants does not hide them.
#[derive(Debug)]
pub struct Hunt {
    root: i32,
    mark: u64,
    seen: Vec<Process>,
    quiet: u32,
}

impl Hunt {
    pub fn new(root: i32, mark: u64) -> Self {
        Self { root, mark, seen: Vec::new(), quiet: 0 }
    }

    /// Scan and kill once. True if nothing below the root is alive; the root is then being killed.
    pub fn step(&mut self, root_is_there: bool) -> bool {
        if root_is_there {
            let _ = sys::send_signal(self.root, sys::SIGSTOP); // in each scan: a program may have continued it
        }
        let processes = all();
        let there = |one: &Process| processes.iter().any(|p| (p.pid, p.born) == (one.pid, one.born));
        self.seen.retain(there);
        let mut roots: Vec<i32> = self.seen.iter().map(|process| process.pid).collect();
        if root_is_there {
            roots.push(self.root);
        }
        self.seen.extend(below(&roots, &processes));
        let marked = |process: &&Process| process.pid != self.root && sys::mark_of(process.pid) == Some(self.mark);
        self.seen.extend(processes.iter().filter(marked));
        self.seen.sort_unstable_by_key(|process| process.pid);
        self.seen.dedup_by_key(|process| process.pid);
        let mut alive = false;
        for one in &self.seen {
            alive |= processes.iter().any(|p| (p.pid, p.born) == (one.pid, one.born) && p.alive);
            let _ = sys::send_signal(one.pid, sys::SIGKILL); // it may just have ended
        }
        self.quiet = if alive { 0 } else { self.quiet + 1 };
        if self.quiet >= QUIET_LOOKS && root_is_there {
            let _ = sys::send_signal(self.root, sys::SIGKILL);
        }
        self.quiet >= QUIET_LOOKS
    }
}

/// Kill everything except this process, once. Returns whether anything alive was found.
pub fn kill_all() -> bool {
    if std::process::id() == 1 {
        let _ = sys::send_signal(-1, sys::SIGKILL); // all at once; there may be none
    }
    let mut found = others();
    found.retain(|process| process.alive);
    for process in &found {
        let _ = sys::send_signal(process.pid, sys::SIGKILL); // it may just have ended
    }
    !found.is_empty()
}

/// All processes in the machine except this one and kernel threads; if this is not the first process of a machine, all
/// of its descendants.
fn others() -> Vec<Process> {
    let own = std::process::id() as i32;
    let mut found = all();
    if own != 1 {
        return below(&[own], &found);
    }
    let kernel = sys::has_kernel_threads();
    found.retain(|p| p.pid != own && !(kernel && (p.pid == KERNEL_THREADS || p.parent == KERNEL_THREADS)));
    found
}

/// Freezes the machine: while this exists, no process that existed before runs. Processes that were stopped by others
/// stay stopped afterwards.
pub struct Standstill(Vec<Process>);

impl Standstill {
    /// Stop everything, and scan until all of it is stopped.
    pub fn begin() -> Self {
        let mut stopped: Vec<Process> = Vec::new();
        for _ in 0..MOST_LOOKS {
            let moving: Vec<Process> = others().into_iter().filter(|process| process.moves).collect();
            if moving.is_empty() {
                break;
            }
            for process in moving {
                if sys::send_signal(process.pid, sys::SIGSTOP).is_ok()
                    && !stopped.iter().any(|known| (known.pid, known.born) == (process.pid, process.born))
                {
                    stopped.push(process);
                }
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Self(stopped)
    }
}

impl Drop for Standstill {
    fn drop(&mut self) {
        let processes = all();
        for one in &self.0 {
            if processes.iter().any(|p| (p.pid, p.born) == (one.pid, one.born)) {
                let _ = sys::send_signal(one.pid, sys::SIGCONT);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(pid: i32, name: &str, state: char, parent: i32, threads: i32) -> Option<Process> {
        let zeros = "0 ".repeat(15);
        parse(pid, format!("{pid} ({name}) {state} {parent} {zeros}{threads} 0 77").as_bytes())
    }

    #[test]
    fn a_name_cannot_pass_itself_off_as_other_fields() {
        let found = line(7, "x) Z 1 (", 'S', 5, 1);
        assert_eq!(found, Some(Process { pid: 7, parent: 5, born: 77, alive: true, moves: true }));
    }

    #[test]
    fn a_dead_first_thread_with_living_siblings_is_alive() {
        assert!(line(7, "a", 'Z', 5, 2).unwrap().alive);
        assert!(!line(7, "a", 'Z', 5, 1).unwrap().alive);
    }

    #[test]
    fn a_tree_is_what_is_below_and_a_loop_ends() {
        let process = |pid, parent| Process { pid, parent, born: 0, alive: true, moves: true };
        let listed = [process(2, 1), process(3, 2), process(4, 3), process(5, 9), process(2, 4)];
        let mut pids: Vec<i32> = below(&[2], &listed).iter().map(|p| p.pid).collect();
        pids.sort_unstable();
        assert_eq!(pids, [2, 3, 4]);
        assert_eq!(parse(1, b""), None);
        assert_eq!(parse(1, b"1 (a) S"), None);
    }
}
