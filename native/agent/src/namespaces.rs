//! Entering a machine that is made of namespaces, as its first process.
//!
//! This process was cloned into the machine's namespaces with its maker's privileges; here it gives them up for good:
//! control groups first, then `/proc` of the new PID namespace, then the user namespace, whose ids are all that it can
//! be afterwards. What it may still do there is be the machine's users, and end what they run.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use crate::sys;
use crate::template::Given;

/// CHOWN, KILL, SETGID, SETUID: what the agent itself uses.
const USED: u64 = 1 | 1 << 5 | 1 << 6 | 1 << 7;

/// Enter, as the user `id` of the machine. The channel to the host, or the step that failed.
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
