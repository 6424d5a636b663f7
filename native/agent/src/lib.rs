//! The machine agent: the first process of a machine. It runs commands and transfers files for the host.
//!
//! docs/formats/agent.md defines the protocol. One thread, no dependencies, no state except for running commands and
//! transfers. Programs that run in the machine are untrusted: they cannot reach the channel to the host (every
//! descriptor is closed on exec, and the agent's memory and `/proc` entry are not accessible to them), cannot signal
//! the agent if it is PID 1, and cannot make it exceed its memory bounds. Knows nothing of tasks, snapshots, or the
//! isolation of the machine.

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
