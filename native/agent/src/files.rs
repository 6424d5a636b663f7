//! Opens files below the working directory, one folder at a time, and never follows a link.
//!
//! No `..` and no absolute paths; every step is opened with `O_NOFOLLOW` relative to the one before: like `openat2`
//! with RESOLVE_BENEATH, but also on kernels without it. Runs as the machine's user, so the kernel checks that user's
//! permissions.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::sys::{self, O_CREAT, O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK, O_PATH, O_WRONLY};

const MAX_PATH: usize = 4095;
const FOLDER: i32 = O_DIRECTORY | O_NOFOLLOW;

/// The components of a relative path. `EINVAL` for a path that is invalid or leaves its folder.
pub fn parts(path: &[u8]) -> io::Result<Vec<CString>> {
    let parts = path.split(|byte| *byte == b'/').filter(|word| !word.is_empty() && *word != b".");
    let parts = parts.map(sys::text).collect::<io::Result<Vec<_>>>()?;
    if path.first() == Some(&b'/') || parts.iter().any(|part| part.as_bytes() == b"..") {
        return Err(sys::error(sys::EINVAL));
    }
    if path.len() > MAX_PATH { Err(sys::error(sys::ENAMETOOLONG)) } else { Ok(parts) }
}

/// The folder that contains the last component of a path, and that component. Missing folders are created if `make` is
/// set.
pub fn parent_of(root: &File, path: &[u8], make: bool) -> io::Result<(OwnedFd, CString)> {
    let mut parts = parts(path)?;
    let name = parts.pop().ok_or_else(|| sys::error(sys::EISDIR))?;
    Ok((folder(root, &parts, make)?, name))
}

/// Open a folder below another one.
pub fn folder(root: &File, parts: &[CString], make: bool) -> io::Result<OwnedFd> {
    let mut at = OwnedFd::from(root.try_clone()?);
    for part in parts {
        if make {
            match sys::make_folder_at(at.as_fd(), part, 0o755) {
                Err(error) if error.raw_os_error() != Some(sys::EEXIST) => return Err(error),
                _ => {}
            }
        }
        let next = sys::open_at(at.as_fd(), part, FOLDER, 0).map_err(|error| link_or(error, &at, part))?;
        if is_link(&at, part) {
            return Err(sys::error(sys::ELOOP)); // gVisor had times when it followed one all the same
        }
        at = next;
    }
    Ok(at)
}

/// Convert the error for a folder that is a link to `ELOOP`.
fn link_or(error: io::Error, at: &OwnedFd, part: &CString) -> io::Error {
    if is_link(at, part) { sys::error(sys::ELOOP) } else { error }
}

fn is_link(at: &OwnedFd, part: &CString) -> bool {
    let looked = sys::open_at(at.as_fd(), part, O_PATH | O_NOFOLLOW, 0).and_then(|fd| File::from(fd).metadata());
    looked.is_ok_and(|found| found.is_symlink())
}

/// Open a regular file for reading; also returns its size.
pub fn open(root: &File, path: &[u8]) -> io::Result<(File, u64)> {
    let (parent, name) = parent_of(root, path, false)?;
    let file = File::from(sys::open_at(parent.as_fd(), &name, O_NONBLOCK | O_NOFOLLOW, 0)?);
    let size = regular(&file)?;
    Ok((file, size))
}

/// Create or truncate a regular file for writing. Missing folders are created.
pub fn create(root: &File, path: &[u8], mode: u32) -> io::Result<File> {
    let (parent, name) = parent_of(root, path, true)?;
    let flags = O_WRONLY | O_CREAT | O_NONBLOCK | O_NOFOLLOW;
    let file = File::from(sys::open_at(parent.as_fd(), &name, flags, mode & 0o777)?);
    regular(&file)?;
    file.set_len(0)?;
    Ok(file)
}

fn regular(file: &File) -> io::Result<u64> {
    let found = file.metadata()?;
    match (found.is_dir(), found.is_file()) {
        (true, _) => Err(sys::error(sys::EISDIR)),
        (_, true) => Ok(found.len()),
        _ => Err(sys::error(sys::ENXIO)),
    }
}
