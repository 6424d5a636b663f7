//! The command line. The creator of the machine writes it, never a program in the machine.

use crate::sys;

/// Docker's usual set without `MKNOD`, which would open every device by its number: CHOWN, DAC_OVERRIDE, FOWNER, FSETID,
/// KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, AUDIT_WRITE, SETFCAP.
const ROOT_CAPABILITIES: u64 = 0xa004_25fb;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug, PartialEq, Eq)]
pub enum Channel {
    Fd(i32),
    Port(String),
    Stdio,
}

/// Descriptors of a template (`template`): the socket for requests, and the process that creates namespaces.
#[derive(Debug, PartialEq, Eq)]
pub struct Template {
    pub requests: i32,
    pub maker: i32,
    pub id: u32, // uid and gid of the agents, in their user namespaces
}

#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    pub channel: Channel,
    pub work: String,
    pub user: String, // of commands that name none, and of files; "": the agent's own
    pub path: String,
    pub limits: Vec<(i32, u64)>,
    pub cpus: Option<u64>, // CPU seconds of each process, a second of its command's deadline; and two more
    pub root_capabilities: u64,
    pub filter: Option<i32>, // a descriptor to read it from
    pub init: bool,
    pub template: Option<Template>,
}

impl Options {
    /// The inherited descriptors that this process needs.
    pub fn descriptors(&self) -> Vec<i32> {
        let channel = if let Channel::Fd(fd) = self.channel { Some(fd) } else { None };
        let template = self.template.iter().flat_map(|template| [&template.requests, &template.maker]);
        channel.iter().chain(&self.filter).chain(template).copied().collect()
    }
}

pub const USAGE: &str =
    "usage: etude-agent --check | (--fd N | --port DEVICE | --stdio | --template N N ID) [--work FOLDER] [--user NAME]
    [--path PATH] [--limit NAME=VALUE]... [--root-capabilities HEX] [--cpus N] [--filter-fd N] [--init]";

/// The arguments to parse: those of the command line, or, if it has none, of the variable `AGENT`, which other users of
/// the machine cannot read.
pub fn arguments() -> Vec<String> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let kept = if given.is_empty() { std::env::var("AGENT").unwrap_or_default() } else { String::new() };
    given.into_iter().chain(kept.lines().map(String::from)).collect()
}

/// Parse the arguments. On error: what is wrong.
pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Options, String> {
    let mut arguments = arguments.into_iter();
    let mut channel = None;
    let mut options = Options {
        channel: Channel::Stdio,
        work: "/".into(),
        user: String::new(),
        path: PATH.into(),
        limits: Vec::new(),
        cpus: None,
        root_capabilities: ROOT_CAPABILITIES,
        filter: None,
        init: false,
        template: None,
    };
    while let Some(word) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{word} wants a value"));
        match word.as_str() {
            "--fd" => channel = Some(Channel::Fd(number(&value()?)?)),
            "--port" => channel = Some(Channel::Port(value()?)),
            "--stdio" => channel = Some(Channel::Stdio),
            "--work" => options.work = value()?,
            "--user" => options.user = value()?,
            "--path" => options.path = value()?,
            "--limit" => options.limits.push(limit(&value()?)?),
            "--root-capabilities" => {
                let text = value()?;
                options.root_capabilities = u64::from_str_radix(&text, 16).map_err(|_| format!("no mask: {text}"))?;
            }
            "--filter-fd" => options.filter = Some(number(&value()?)?),
            "--cpus" => options.cpus = Some(number(&value()?)?),
            "--template" => {
                let (requests, maker) = (number(&value()?)?, number(&value()?)?);
                options.template = Some(Template { requests, maker, id: number(&value()?)? });
            }
            "--init" => options.init = true,
            _ => return Err(format!("unknown: {word}")),
        }
    }
    if options.template.is_none() || channel.is_some() {
        options.channel = channel.ok_or("no channel was named")?;
    }
    Ok(options)
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("no number: {text}"))
}

fn limit(text: &str) -> Result<(i32, u64), String> {
    let (name, value) = text.split_once('=').ok_or(format!("no limit: {text}"))?;
    let resource = sys::resource(name).ok_or(format!("no such limit: {name}"))?;
    Ok((resource, number(value)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<Options, String> {
        parse(line.split_whitespace().map(String::from))
    }

    #[test]
    fn a_command_line_says_where_the_host_is_and_what_holds() {
        let options = of("--port /dev/virtio-ports/agent --work /w --limit nofile=256 --init --user user").unwrap();
        assert_eq!(options.channel, Channel::Port("/dev/virtio-ports/agent".into()));
        assert_eq!((options.limits.as_slice(), options.init), ([(7, 256)].as_slice(), true));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for line in ["", "--fd", "--fd x", "--stdio --limit cake=1", "--stdio --limit nofile", "--stdio --what"] {
            assert!(of(line).is_err(), "{line}");
        }
    }
}
