//! The requests of the host, parsed from frames. Parsing never allocates more than the size of its frame.

use crate::frames::{Frame, Malformed};

/// Standard input stays open for `Input` requests.
pub const STDIN: u8 = 1;
/// Output is sent as it arrives, stdout and stderr separately.
pub const APART: u8 = 2;
/// Output is sent as it arrives, stdout and stderr combined.
pub const WHOLE: u8 = 4;

#[derive(Debug, PartialEq, Eq)]
pub enum Request {
    Run(Run),
    Input(Vec<u8>),
    Kill,
    Read { max_bytes: u64, path: Vec<u8> },
    Write { mode: u32, last: bool, path: Vec<u8>, data: Vec<u8> },
    Save { max_bytes: u64 },
    Load { last: bool, part: Vec<u8> },
    Freeze,
    Renew { seed: Vec<u8>, clock_ns: Option<u64>, host_name: Vec<u8> },
    Ping,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Run {
    pub deadline_ms: u32,
    pub output_bytes: u32,
    pub flags: u8,
    pub user: Vec<u8>,
    pub cwd: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>, // NAME=value
}

/// Parse the request in a frame.
pub fn parse(frame: Frame) -> Result<Request, Malformed> {
    let mut body = Body(&frame.body);
    let request = match frame.kind {
        b'E' => return run(body).map(Request::Run),
        b'I' => return Ok(Request::Input(frame.body)),
        b'K' => Request::Kill,
        b'R' => {
            let max_bytes = body.u64()?;
            return Ok(Request::Read { max_bytes, path: path(body.rest())? });
        }
        b'W' => {
            let (mode, last) = (body.u32()?, body.u8()? != 0);
            let length = body.u16()?.into();
            let path = path(body.take(length)?)?;
            return Ok(Request::Write { mode, last, path, data: body.rest() });
        }
        b'S' => Request::Save { max_bytes: body.u64()? },
        b'L' => {
            let last = body.u8()? != 0;
            return Ok(Request::Load { last, part: body.rest() });
        }
        b'Z' => Request::Freeze,
        b'N' => renew(&mut body)?,
        b'P' => Request::Ping,
        _ => return Err(Malformed("a request of an unknown kind")),
    };
    if body.0.is_empty() { Ok(request) } else { Err(Malformed("bytes after a request")) }
}

fn run(mut body: Body<'_>) -> Result<Run, Malformed> {
    let (deadline_ms, output_bytes, flags) = (body.u32()?, body.u32()?, body.u8()?);
    let mut fields = body.fields()?.into_iter();
    let mut next = || fields.next().ok_or(Malformed("a command without all its fields"));
    let (user, cwd, count) = (next()?, next()?, next()?);
    let count = std::str::from_utf8(&count).ok().and_then(|text| text.parse::<usize>().ok());
    let mut argv: Vec<_> = fields.collect();
    let count = count.filter(|n| (1..=argv.len()).contains(n)).ok_or(Malformed("a command without words"))?;
    let env = argv.split_off(count);
    let has_nul = [&user, &cwd].into_iter().chain(&argv).chain(&env).any(|word| word.contains(&0));
    if has_nul || env.iter().any(|v| v.iter().position(|b| *b == b'=').unwrap_or(0) == 0) {
        return Err(Malformed("a NUL byte, or a variable without a name"));
    }
    Ok(Run { deadline_ms, output_bytes, flags, user, cwd, argv, env })
}

fn renew(body: &mut Body<'_>) -> Result<Request, Malformed> {
    let [seed, clock, host_name] =
        <[Vec<u8>; 3]>::try_from(body.fields()?).map_err(|_| Malformed("a new machine has three fields"))?;
    let clock_ns = match clock.as_slice() {
        [] => None,
        bytes => Some(u64::from_le_bytes(bytes.try_into().map_err(|_| Malformed("a time has eight bytes"))?)),
    };
    Ok(Request::Renew { seed, clock_ns, host_name })
}

/// Check what is invalid in any path. Components are checked where the path is used.
fn path(bytes: Vec<u8>) -> Result<Vec<u8>, Malformed> {
    if bytes.contains(&0) { Err(Malformed("a NUL byte in a path")) } else { Ok(bytes) }
}

struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn take(&mut self, length: usize) -> Result<Vec<u8>, Malformed> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed("a body that is cut off"))?;
        self.0 = rest;
        Ok(taken.to_vec())
    }

    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed("a body that is cut off"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn rest(self) -> Vec<u8> {
        self.0.to_vec()
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.chunk().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.chunk().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.chunk().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.chunk().map(u64::from_le_bytes)
    }

    fn fields(&mut self) -> Result<Vec<Vec<u8>>, Malformed> {
        let count = self.u32()?;
        let mut fields = Vec::new(); // grows with the received bytes, not with the stated count
        for _ in 0..count {
            let length = self.u32()? as usize;
            fields.push(self.take(length)?);
        }
        if self.0.is_empty() { Ok(fields) } else { Err(Malformed("bytes after the last field")) }
    }
}
