//! The users that commands run as: from the machine's `/etc/passwd`, read each time, since programs may have changed
//! it.

use std::fs::File;
use std::io::Read;

const MOST_BYTES: u64 = 1 << 20;
const USUAL_BYTES: usize = 4 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: Vec<u8>,
    pub uid: u32,
    pub gid: u32,
    pub home: Vec<u8>,
}

/// The user with this name or number; None if the machine has none. A number needs no entry.
pub fn find(name: &[u8]) -> Option<User> {
    let mut passwd = Vec::with_capacity(USUAL_BYTES);
    if let Ok(file) = File::open("/etc/passwd") {
        let _ = file.take(MOST_BYTES).read_to_end(&mut passwd); // what could be read
    }
    find_in(&passwd, name)
}

/// Like `find`, in the text of a passwd file.
pub fn find_in(passwd: &[u8], name: &[u8]) -> Option<User> {
    let number = number(name);
    let mut entries = passwd.split(|byte| *byte == b'\n').filter_map(entry);
    let found = entries.find(|user| user.name == name || Some(user.uid) == number);
    found.or_else(|| number.map(|uid| User { name: name.to_vec(), uid, gid: uid, home: b"/".to_vec() }))
}

fn entry(line: &[u8]) -> Option<User> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b':').collect();
    let [name, _, uid, gid, _, home, ..] = fields[..] else { return None };
    let (uid, gid) = (number(uid)?, number(gid)?);
    (!name.is_empty()).then(|| User { name: name.to_vec(), uid, gid, home: home.to_vec() })
}

/// Parse a user number; not the one that means "no change" to the kernel.
fn number(text: &[u8]) -> Option<u32> {
    let digits = text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok().filter(|n| *n != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\n# no user\nuser:x:1000:1001:u:/workspace:/bin/sh\nbad:x:-1:0::/:\n";

    #[test]
    fn a_user_is_found_by_name_and_by_number() {
        let user = find_in(PASSWD, b"user").unwrap();
        assert_eq!((user.uid, user.gid, user.home.as_slice()), (1000, 1001, b"/workspace".as_slice()));
        assert_eq!(find_in(PASSWD, b"1000"), Some(user));
    }

    #[test]
    fn a_number_needs_no_entry_and_a_name_does() {
        assert_eq!(find_in(PASSWD, b"77").map(|user| (user.uid, user.gid)), Some((77, 77)));
        for name in [b"nobody-here".as_slice(), b"", b"bad", b"4294967295", b"# no user"] {
            assert_eq!(find_in(PASSWD, name), None);
        }
    }
}
