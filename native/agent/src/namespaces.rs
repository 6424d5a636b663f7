//! Enters a machine made of namespaces, as its first process.
//!
//! This process was cloned into the machine's namespaces with the privileges of its creator. Here it drops them
//! permanently: first control groups, then `/proc` of the new PID namespace, then the user namespace, after which it
//! can only become the ids of that namespace. It keeps the capabilities to switch to the machine's users and to kill
//! their processes.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use crate::sys;
use crate::template::Given;

/// CHOWN, KILL, SETGID, SETUID: the capabilities that the agent itself uses.
const USED: u64 = 1 | 1 << 5 | 1 << 6 | 1 << 7;

/// Enter as user `id` of the machine. Returns the channel to the host, or the step that failed.
pub fn enter(given: Given, id: u32, root_capabilities: u64) -> Result<OwnedFd, (&'static str, io::Error)> {
    let at = |step: &'static str| move |error: io::Error| (step, error);
    for group in given.groups {
        File::from(group).write_all(b"0").map_err(at("entering a control group"))?;
    }
    sys::leave_control_groups_namespace().map_err(at("leaving the control groups' namespace"))?;
    sys::mount_at(c"proc", c"/proc", c"proc", sys::NOSUID | sys::NODEV | sys::NOEXEC, c"")
        .map_err(at("mounting /proc"))?;
    let _ = sys::leave_groups(); // there may be none, and no right to say so
    sys::enter_namespaces(&given.users, sys::USERS).map_err(at("entering a user namespace"))?;
    sys::keep_over_change_of_user().map_err(at("keeping capabilities"))?;
    sys::become_user(id, id).map_err(at("becoming the agent's user"))?;
    let permitted = (USED | root_capabilities) & sys::permitted_capabilities();
    sys::hold_capabilities(USED & permitted, permitted).map_err(at("dropping capabilities"))?;
    sys::no_new_privileges().map_err(at("refusing new privileges"))?;
    Ok(given.channel)
}
