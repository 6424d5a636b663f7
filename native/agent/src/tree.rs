//! The working directory as one frame: `u8 1 | u32 count | count x (u32 length | bytes)`, with three fields per entry,
//! sorted by path: path, kind, content. Kinds: `d` folder, `l` link (content: its target), `x` executable file, `f`
//! file.

use std::collections::VecDeque;
use std::ffi::CString;
use std::fs::{File, FileTimes};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime};

use crate::files;
use crate::processes::Standstill;
use crate::sys::{self, O_DIRECTORY, O_NOFOLLOW, O_PATH};

const TREE: u8 = 1;
const MAX_ENTRIES: usize = (1 << 18) / 3;
const MAX_NAMES: usize = 16 << 20; // bytes of all paths and links, which are kept in memory
const MAX_PATH: u32 = 4095;
const TIME: Duration = Duration::from_secs(1_700_000_000); // of everything that is loaded

struct Entry {
    path: Vec<u8>,
    kind: u8,
    size: u64,
    target: Vec<u8>,
}

/// A tree that is being sent. It is listed first, so that its size is known before it is read.
pub struct Saving {
    root: File,
    entries: VecDeque<Entry>,
    head: Vec<u8>,
    file: Option<(File, u64)>, // that is being read, and how much is left of it
    _still: Standstill,        // nothing moves meanwhile
}

impl Saving {
    /// List everything below `root`; `EFBIG` above `max_bytes` of content, or of names.
    pub fn new(root: &File, max_bytes: u64) -> io::Result<Self> {
        let still = Standstill::begin();
        let mut entries = list(root, max_bytes)?;
        entries.make_contiguous().sort_unstable_by(|a, b| a.path.cmp(&b.path));
        let mut head = vec![TREE];
        head.extend((3 * entries.len() as u32).to_le_bytes());
        Ok(Self { root: root.try_clone()?, entries, head, file: None, _still: still })
    }

    /// The next bytes; none at the end. An error if a file shrank or disappeared since it was listed.
    pub fn next(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.head.is_empty() {
                let length = self.head.len().min(buffer.len());
                buffer[..length].copy_from_slice(&self.head[..length]);
                self.head.drain(..length);
                return Ok(length);
            }
            if let Some((file, left)) = self.file.as_mut().filter(|(_, left)| *left > 0) {
                let most = buffer.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                let length = file.read(&mut buffer[..most])?;
                if length == 0 {
                    return Err(sys::error(sys::EAGAIN));
                }
                *left -= length as u64;
                return Ok(length);
            }
            let Some(entry) = self.entries.pop_front() else { return Ok(0) };
            self.file = None;
            for field in [entry.path.as_slice(), &[entry.kind]] {
                self.head.extend((field.len() as u32).to_le_bytes());
                self.head.extend(field);
            }
            self.head.extend((entry.size as u32).to_le_bytes());
            self.head.extend(&entry.target);
            if matches!(entry.kind, b'f' | b'x') {
                self.file = Some((files::open(&self.root, &entry.path)?.0, entry.size));
            }
        }
    }
}

fn list(root: &File, max_bytes: u64) -> io::Result<VecDeque<Entry>> {
    let (mut entries, mut folders) = (VecDeque::new(), vec![Vec::new()]);
    let (mut content, mut names) = (0_u64, 0_usize);
    while let Some(at) = folders.pop() {
        let folder = files::folder(root, &files::parts(&at)?, false)?;
        let readable = sys::open_at(folder.as_fd(), c".", O_DIRECTORY, 0)?;
        for name in sys::names_in(readable.as_fd())? {
            let path =
                if at.is_empty() { name.as_bytes().to_vec() } else { [&at, &b"/"[..], name.as_bytes()].concat() };
            let found = File::from(sys::open_at(folder.as_fd(), &name, O_PATH | O_NOFOLLOW, 0)?).metadata()?;
            let mut entry = Entry { path, kind: b'f', size: 0, target: Vec::new() };
            if found.is_dir() {
                entry.kind = b'd';
                folders.push(entry.path.clone());
            } else if found.is_symlink() {
                entry.kind = b'l';
                entry.target = sys::read_link_at(folder.as_fd(), &name)?;
                entry.size = entry.target.len() as u64;
            } else if found.is_file() {
                entry.kind = if found.permissions().mode() & 0o100 != 0 { b'x' } else { b'f' };
                entry.size = found.len();
                content += entry.size;
            } else {
                continue; // sockets, pipes and devices are not content
            }
            names += entry.path.len() + entry.target.len();
            if content > max_bytes.min(u32::MAX.into()) || names > MAX_NAMES || entries.len() >= MAX_ENTRIES {
                return Err(sys::error(sys::EFBIG));
            }
            entries.push_back(entry);
        }
    }
    Ok(entries)
}

/// A tree that is being received. Links are created last, so that nothing is written through a link. All files and
/// folders get the same fixed time, so that forks of a tree look like newly loaded ones.
pub struct Loading {
    root: File,
    waiting: Vec<u8>, // less than one field, but for a file's content
    expects: Expects,
    fields_left: u32,
    path: Vec<u8>,
    kind: u8,
    file: Option<File>,
    links: Vec<(Vec<u8>, CString)>,
    folders: Vec<Vec<u8>>,
    names: usize,
}

enum Expects {
    Head,
    Length,
    Field { which: u32, left: u32 },
}

impl Loading {
    pub fn new(root: &File) -> io::Result<Self> {
        Ok(Self {
            root: root.try_clone()?,
            waiting: Vec::new(),
            expects: Expects::Head,
            fields_left: 0,
            path: Vec::new(),
            kind: 0,
            file: None,
            links: Vec::new(),
            folders: vec![Vec::new()],
            names: 0,
        })
    }

    /// Process more bytes of the frame. `EINVAL` for bytes that are not a tree.
    pub fn add(&mut self, mut part: &[u8]) -> io::Result<()> {
        while !part.is_empty() {
            part = match self.expects {
                Expects::Head => self.head(part)?,
                Expects::Length => self.length(part)?,
                Expects::Field { which, left } => self.field(which, left, part)?,
            };
        }
        Ok(())
    }

    /// End of the frame: create links.
    pub fn finish(mut self) -> io::Result<()> {
        if self.fields_left > 0 || !self.waiting.is_empty() || !matches!(self.expects, Expects::Length) {
            return Err(sys::error(sys::EINVAL));
        }
        for (path, target) in std::mem::take(&mut self.links) {
            let (parent, name) = files::parent_of(&self.root, &path, true)?;
            sys::link_at(&target, parent.as_fd(), &name)?;
        }
        for path in &self.folders {
            set_time(&File::from(files::folder(&self.root, &files::parts(path)?, false)?));
        }
        Ok(())
    }

    /// Collect `size` bytes. Returns whether they are complete, and the rest of `part`.
    fn gather<'a>(&mut self, size: usize, part: &'a [u8]) -> (bool, &'a [u8]) {
        let (now, rest) = part.split_at((size - self.waiting.len()).min(part.len()));
        self.waiting.extend(now);
        (self.waiting.len() == size, rest)
    }

    fn head<'a>(&mut self, part: &'a [u8]) -> io::Result<&'a [u8]> {
        let (whole, rest) = self.gather(5, part);
        if whole {
            let head = std::mem::take(&mut self.waiting);
            self.fields_left = u32::from_le_bytes([head[1], head[2], head[3], head[4]]);
            if head[0] != TREE || !self.fields_left.is_multiple_of(3) || self.fields_left as usize > 3 * MAX_ENTRIES {
                return Err(sys::error(sys::EINVAL));
            }
            self.expects = Expects::Length;
        }
        Ok(rest)
    }

    fn length<'a>(&mut self, part: &'a [u8]) -> io::Result<&'a [u8]> {
        if self.fields_left == 0 {
            return Err(sys::error(sys::EINVAL)); // bytes after the last field
        }
        let (whole, rest) = self.gather(4, part);
        if whole {
            let left = u32::from_le_bytes([self.waiting[0], self.waiting[1], self.waiting[2], self.waiting[3]]);
            self.waiting.clear();
            let which = (3 - self.fields_left % 3) % 3;
            self.fields_left -= 1;
            let content = match self.kind {
                b'd' => 0,
                b'l' => MAX_PATH,
                _ => u32::MAX,
            };
            if left > [MAX_PATH, 1, content][which as usize] {
                return Err(sys::error(sys::EINVAL));
            }
            if which == 2 && matches!(self.kind, b'f' | b'x') {
                let mode = if self.kind == b'x' { 0o755 } else { 0o644 };
                self.file = Some(files::create(&self.root, &self.path, mode)?);
            }
            self.expects = Expects::Field { which, left };
            if left == 0 {
                self.complete(which)?;
            }
        }
        Ok(rest)
    }

    fn field<'a>(&mut self, which: u32, left: u32, part: &'a [u8]) -> io::Result<&'a [u8]> {
        let (now, rest) = part.split_at((left as usize).min(part.len()));
        match &mut self.file {
            Some(file) => file.write_all(now)?,
            None => self.waiting.extend(now),
        }
        let left = left - now.len() as u32;
        self.expects = Expects::Field { which, left };
        if left == 0 {
            self.complete(which)?;
        }
        Ok(rest)
    }

    fn complete(&mut self, which: u32) -> io::Result<()> {
        self.expects = Expects::Length;
        let field = std::mem::take(&mut self.waiting);
        match which {
            0 => self.path = field,
            1 => {
                self.kind = *field.first().ok_or_else(|| sys::error(sys::EINVAL))?;
                if !matches!(self.kind, b'd' | b'l' | b'f' | b'x') {
                    return Err(sys::error(sys::EINVAL));
                }
            }
            _ => self.entry(field)?,
        }
        Ok(())
    }

    fn entry(&mut self, content: Vec<u8>) -> io::Result<()> {
        if let Some(file) = self.file.take() {
            set_time(&file);
            return Ok(());
        }
        self.names += self.path.len() + content.len();
        if self.names > MAX_NAMES {
            return Err(sys::error(sys::EFBIG));
        }
        let path = std::mem::take(&mut self.path);
        if self.kind == b'd' {
            files::folder(&self.root, &files::parts(&path)?, true)?;
            self.folders.push(path);
        } else {
            self.links.push((path, sys::text(&content)?));
        }
        Ok(())
    }
}

/// Set the fixed time. Ignores files of other owners.
fn set_time(file: &File) {
    let time = SystemTime::UNIX_EPOCH + TIME;
    let _ = file.set_times(FileTimes::new().set_accessed(time).set_modified(time));
}
