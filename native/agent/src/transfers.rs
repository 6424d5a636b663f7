//! File and tree transfers, one piece at a time, so that commands are served meanwhile.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};

use crate::files;
use crate::frames::{Malformed, Outbox};
use crate::options::Options;
use crate::requests::Request;
use crate::sys;
use crate::tree::{Loading, Saving};
use crate::users;

const MAX_TRANSFERS: usize = 32;

enum Transfer {
    Reading { file: File, left: u64 }, // and one byte more than is allowed is an error
    Writing(File),
    Saving(Box<Saving>),
    Loading(Box<Loading>),
    Failed, // answered; what still comes for it is let go by
}

/// The running transfers, by id.
pub struct Transfers {
    work: String,
    user: String,
    running: BTreeMap<u32, Transfer>,
}

impl Transfers {
    pub fn new(options: &Options) -> io::Result<Self> {
        Ok(Self { work: options.work.clone(), user: options.user.clone(), running: BTreeMap::new() })
    }

    /// Whether there is something to send.
    pub fn has_more(&self) -> bool {
        self.running.values().any(|transfer| matches!(transfer, Transfer::Reading { .. } | Transfer::Saving(_)))
    }

    pub fn clear(&mut self) {
        self.running.clear();
    }

    /// Handle a file request: start or continue a transfer.
    pub fn begin(&mut self, id: u32, request: Request, out: &mut Outbox) -> Result<(), Malformed> {
        let is_new = !self.running.contains_key(&id);
        let goes_on = matches!(request, Request::Write { .. } | Request::Load { .. });
        if !is_new && !goes_on {
            return Err(Malformed("a transfer with the id of another"));
        }
        let last = !matches!(request, Request::Write { last: false, .. } | Request::Load { last: false, .. });
        let result = if is_new && self.running.len() >= MAX_TRANSFERS {
            Err(sys::error(sys::EAGAIN))
        } else {
            self.as_user(|transfers| transfers.take(id, request))
        };
        match result {
            Ok(true) => out.put(b'k', id, &[]),
            Ok(false) => {}
            Err(error) => {
                refuse(id, &error, out);
                if last || self.running.len() >= MAX_TRANSFERS && is_new {
                    self.running.remove(&id);
                } else {
                    self.running.insert(id, Transfer::Failed);
                }
            }
        }
        Ok(())
    }

    /// Handle one request. Returns whether the transfer is finished.
    fn take(&mut self, id: u32, request: Request) -> io::Result<bool> {
        match request {
            Request::Read { max_bytes, path } => {
                let (file, size) = files::open(&self.root()?, &path)?;
                if size > max_bytes {
                    return Err(sys::error(sys::EFBIG));
                }
                self.running.insert(id, Transfer::Reading { file, left: max_bytes });
                Ok(false)
            }
            Request::Save { max_bytes } => {
                let saving = Saving::new(&self.root()?, max_bytes)?;
                self.running.insert(id, Transfer::Saving(Box::new(saving)));
                Ok(false)
            }
            Request::Write { mode, last, path, data } => self.write(id, mode, last, &path, &data),
            Request::Load { last, part } => self.load(id, last, &part),
            _ => Err(sys::error(sys::EINVAL)),
        }
    }

    fn write(&mut self, id: u32, mode: u32, last: bool, path: &[u8], data: &[u8]) -> io::Result<bool> {
        let mut file = match self.running.remove(&id) {
            None => files::create(&self.root()?, path, mode)?,
            Some(Transfer::Writing(file)) => file,
            Some(_) => return Ok(self.go_on_failing(id, last)),
        };
        if let Err(error) = file.write_all(data) {
            let _ = file.set_len(0); // half a file helps nobody and holds the space
            return Err(error);
        }
        if !last {
            self.running.insert(id, Transfer::Writing(file));
        }
        Ok(last)
    }

    fn load(&mut self, id: u32, last: bool, part: &[u8]) -> io::Result<bool> {
        let mut loading = match self.running.remove(&id) {
            None => Box::new(Loading::new(&self.root()?)?),
            Some(Transfer::Loading(loading)) => loading,
            Some(_) => return Ok(self.go_on_failing(id, last)),
        };
        loading.add(part)?;
        if last {
            loading.finish()?;
        } else {
            self.running.insert(id, Transfer::Loading(loading));
        }
        Ok(last)
    }

    fn go_on_failing(&mut self, id: u32, last: bool) -> bool {
        if !last {
            self.running.insert(id, Transfer::Failed);
        }
        false
    }

    /// Send a piece of each transfer, while there is space.
    pub fn go_on(&mut self, buffer: &mut [u8], out: &mut Outbox) {
        if !self.has_more() || !out.has_room() {
            return;
        }
        let ids: Vec<u32> = self.running.keys().copied().collect();
        for id in ids {
            if !out.has_room() {
                break;
            }
            let Some(mut transfer) = self.running.remove(&id) else { continue };
            let sent = self.as_user(|_| match &mut transfer {
                Transfer::Reading { file, left } => read(file, left, buffer),
                Transfer::Saving(saving) => saving.next(buffer),
                _ => Ok(usize::MAX),
            });
            match sent {
                Ok(usize::MAX) => drop(self.running.insert(id, transfer)),
                Ok(0) => out.put(b'k', id, &[]),
                Ok(length) => {
                    out.put(b'd', id, &[&buffer[..length]]);
                    self.running.insert(id, transfer);
                }
                Err(error) => refuse(id, &error, out),
            }
        }
    }

    fn root(&self) -> io::Result<File> {
        File::open(&self.work)
    }

    /// Run `work` with the file access rights of the machine's user.
    fn as_user<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let own = (sys::user_id(), sys::group_id());
        let user = Some(&self.user).filter(|name| !name.is_empty() && sys::can_change_user());
        let Some(user) = user.and_then(|name| users::find(name.as_bytes())) else { return work(self) };
        sys::act_on_files_as(user.uid, user.gid);
        let result = work(self);
        sys::act_on_files_as(own.0, own.1);
        result
    }
}

fn read(file: &mut File, left: &mut u64, buffer: &mut [u8]) -> io::Result<usize> {
    let length = file.read(buffer)?;
    *left = left.checked_sub(length as u64).ok_or_else(|| sys::error(sys::EFBIG))?;
    Ok(length)
}

fn refuse(id: u32, error: &io::Error, out: &mut Outbox) {
    let number = error.raw_os_error().unwrap_or(sys::EINVAL);
    out.put(b'e', id, &[&(number as u32).to_le_bytes(), sys::error_text(error).as_bytes()]);
}
