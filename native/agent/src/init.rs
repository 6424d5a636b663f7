//! Setup that the first process of a virtual machine must do before anything else: mount the kernel's file systems, and
//! bring up the loopback interface.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::net::UdpSocket;

use crate::sys::{self, NODEV, NOEXEC, NOSUID};

const MOUNTS: [(&CStr, &CStr, &CStr, u64, &CStr); 7] = [
    (c"proc", c"/proc", c"proc", NOSUID | NODEV | NOEXEC, c""),
    (c"sysfs", c"/sys", c"sysfs", NOSUID | NODEV | NOEXEC, c""),
    (c"devtmpfs", c"/dev", c"devtmpfs", NOSUID, c"mode=755"),
    (c"devpts", c"/dev/pts", c"devpts", NOSUID | NOEXEC, c"mode=620,ptmxmode=666"),
    (c"tmpfs", c"/dev/shm", c"tmpfs", NOSUID | NODEV, c"mode=1777"),
    (c"tmpfs", c"/run", c"tmpfs", NOSUID | NODEV, c"mode=755"),
    (c"tmpfs", c"/tmp", c"tmpfs", NOSUID | NODEV, c"mode=1777"),
];
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];
const EBUSY: i32 = 16; // already mounted

/// Bring up the loopback interface with its address. Does nothing on a kernel without one.
pub fn loopback() {
    if let Ok(socket) = UdpSocket::bind(("0.0.0.0", 0)) {
        let _ = sys::bring_up_loopback(&socket);
    }
}

/// Mount what is missing. On error: the first step that failed.
pub fn mount_all() -> Result<(), (String, io::Error)> {
    for (from, to, kind, flags, data) in MOUNTS {
        let place = to.to_string_lossy();
        let _ = fs::create_dir_all(&*place); // a read-only root may have it, or the mount says that it has not
        match sys::mount_at(from, to, kind, flags, data) {
            Err(error) if error.raw_os_error() != Some(EBUSY) => return Err((format!("mounting {place}"), error)),
            _ => {}
        }
    }
    for (target, link) in LINKS {
        let _ = std::os::unix::fs::symlink(target, link); // it may be there
    }
    Ok(())
}
