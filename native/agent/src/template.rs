//! A process that waits in its creator's namespaces and becomes the first process of one machine after the other, by
//! cloning itself: so a program is loaded, linked and configured once, not for every machine.
//!
//! For each machine it receives descriptors: the channel to the host, the user namespace, the control groups. Meanwhile
//! the creator is in the namespaces that the machine will have. The clone is a child of the creator; the response is
//! its pid, or the negative error number.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use crate::options::Template;
use crate::sys::{self, NAMESPACES};

/// The descriptors of a machine's first process.
pub struct Given {
    pub channel: OwnedFd,
    pub users: OwnedFd,
    pub groups: Vec<OwnedFd>,
}

/// Answer requests until the creator ends; then returns None. In each clone, returns its descriptors.
pub fn serve(template: &Template) -> io::Result<Option<Given>> {
    serve_maker(template).or_else(|error| match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Ok(None), // it went without its answer
        _ => Err(error),
    })
}

fn serve_maker(template: &Template) -> io::Result<Option<Given>> {
    let (requests, maker) = (sys::take_over(template.requests)?, sys::take_over(template.maker)?);
    let home = NAMESPACES.iter().map(|(name, kind)| Ok((File::open(format!("/proc/self/ns/{name}"))?, *kind)));
    let home = home.collect::<io::Result<Vec<_>>>()?;
    let all = NAMESPACES.iter().fold(0, |all, (_, kind)| all | kind);
    while let Some(given) = sys::receive_descriptors(&requests)? {
        let born = sys::enter_namespaces(&maker, all).and_then(|()| sys::clone_first_process());
        if matches!(born, Ok(0)) {
            return Ok(Some(sorted(given)?));
        }
        for (namespace, kind) in &home {
            sys::enter_namespaces(namespace, *kind)?;
        }
        let answer = born.unwrap_or_else(|error| -error.raw_os_error().unwrap_or(sys::EINVAL));
        sys::send_number(&requests, answer)?;
    }
    Ok(None)
}

fn sorted(given: Vec<OwnedFd>) -> io::Result<Given> {
    let mut given = given.into_iter();
    let mut next = || given.next().ok_or_else(|| sys::error(sys::EINVAL));
    Ok(Given { channel: next()?, users: next()?, groups: given.collect() })
}
