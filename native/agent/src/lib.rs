//! The machine agent: the first process of a machine, which runs commands and moves files for the host.
//!
//! The protocol is in docs/formats/agent.md. One thread, no crates, no state but what is under way. Tools that run in
//! the machine are hostile: they have no way to the channel (every descriptor is closed on exec, the agent's memory and
//! `/proc` entry are closed to them), cannot signal it where it is PID 1, and cannot make it hold more than its bounds.
//! Knows nothing of tasks, of snapshots, and of what isolates the machine.

pub mod agent;
pub mod command;
pub mod files;
pub mod frames;
pub mod identity;
pub mod init;
pub mod link;
pub mod namespaces;
pub mod options;
pub mod output;
pub mod processes;
pub mod requests;
pub mod spawn;
pub mod sys;
pub mod template;
pub mod transfers;
pub mod tree;
pub mod users;
