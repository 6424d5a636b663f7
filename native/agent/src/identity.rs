//! Changes the identity of a machine: its random numbers, time and name. Empty values are left unchanged.

use std::fs::{self, File};
use std::io::{self, Read};

use crate::sys;

const MACHINE_ID: &str = "/etc/machine-id";
const POOL: &str = "/dev/urandom";
const LAST_PROCESS: &str = "/proc/sys/kernel/ns_last_pid";
const MOST_PROCESSES: u64 = 256;
const MOST_BEFORE_S: u64 = 600;
const MOST_HELD: u64 = 1 << 20;

/// The identity of a machine and its visible history. Without changes, all forks of one boot would have the same uptime
/// to the hundredth of a second, the same next process id, and the same free memory.
#[derive(Default)]
pub struct Identity {
    is_new: bool,  // nothing was started since the last `renew`
    before_s: u64, // seconds that were added to the uptime
    held: Vec<u8>, // memory that is only used to be used
}

impl Identity {
    /// Apply the given changes. On error: the step that failed, and why.
    pub fn renew(
        &mut self,
        seed: &[u8],
        clock_ns: Option<u64>,
        host_name: &[u8],
    ) -> Result<(), (&'static str, io::Error)> {
        if !seed.is_empty() {
            reseed(seed).map_err(|error| ("reseeding the random pool", error))?;
            if std::process::id() == 1 {
                renew_machine_id();
                self.is_new = true;
            }
        }
        if let Some(ns) = clock_ns {
            sys::set_clock(ns).map_err(|error| ("setting the clock", error))?;
        }
        if !host_name.is_empty() {
            sys::set_host_name(host_name).map_err(|error| ("naming the machine", error))?;
        }
        Ok(())
    }

    /// Before the first command: give a new machine a history of its own.
    pub fn prepare(&mut self) {
        if std::mem::take(&mut self.is_new) {
            let _ = self.randomize_history(); // older kernels do not support it
        }
    }

    /// Advance the process ids, use some memory, and increase the uptime: never decrease it, and only if no running
    /// process has seen it.
    fn randomize_history(&mut self) -> io::Result<()> {
        let mut pool = File::open(POOL)?;
        let mut below = |most: u64| -> io::Result<u64> {
            let mut drawn = [0; 8];
            pool.read_exact(&mut drawn)?;
            Ok(u64::from_le_bytes(drawn) % most)
        };
        self.held = vec![1; below(MOST_HELD)? as usize];
        if let Ok(last) = fs::read_to_string(LAST_PROCESS)?.trim().parse::<u64>() {
            let _ = fs::write(LAST_PROCESS, (last + below(MOST_PROCESSES)?).to_string()); // past the largest, it stays
        }
        if !sys::has_children() {
            let before_s = self.before_s + below(MOST_BEFORE_S)?;
            sys::have_clocks_ahead(before_s)?;
            self.before_s = before_s;
        }
        Ok(())
    }
}

fn reseed(seed: &[u8]) -> io::Result<()> {
    let seed = seed.try_into().map_err(|_| sys::error(sys::EINVAL))?;
    sys::reseed(&File::options().write(true).open(POOL)?, seed)
}

/// Write a new machine id, if the machine has a writable one.
fn renew_machine_id() {
    let fresh = fs::read_to_string("/proc/sys/kernel/random/uuid").map(|uuid| uuid.replace('-', ""));
    if let (Ok(number), true) = (fresh, fs::exists(MACHINE_ID).unwrap_or(false)) {
        let _ = fs::write(MACHINE_ID, number); // a read-only root keeps its own
    }
}
