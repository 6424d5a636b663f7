//! `etude-agent`: see the library.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use etude_agent::agent::Agent;
use etude_agent::link::Link;
use etude_agent::options::{self, Channel, Options, USAGE};
use etude_agent::{init, namespaces, sys, template};

/// The minimum OOM score of all processes in machines made from a template, so that the kernel kills them before
/// processes of the host. Written with `CAP_SYS_RESOURCE`, so nothing in the machine can lower it; commands start with
/// a higher one.
const LEAST_SCORE: &str = "900";
const MOST_FILTER: usize = 8 * 4096; // bytes; the kernel takes as many instructions

fn main() -> ExitCode {
    let arguments = options::arguments();
    if arguments == ["--check"] {
        return ExitCode::SUCCESS; // this machine can run it
    }
    let options = match options::parse(arguments) {
        Ok(options) => options,
        Err(wrong) => {
            eprintln!("etude-agent: {wrong}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let result = serve(&options);
    if let Err(why) = &result {
        eprintln!("etude-agent: {why}");
    }
    if options.init {
        sys::power_off();
    }
    if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn serve(options: &Options) -> Result<(), String> {
    let at = |step: &'static str| move |error: io::Error| format!("{step}: {error}");
    sys::close_all_but(&options.descriptors());
    if options.init {
        init::mount_all().map_err(|(step, error)| format!("{step}: {error}"))?;
        init::loopback();
    }
    if options.template.is_some() {
        let _ = fs::write("/proc/self/oom_score_adj", LEAST_SCORE); // as long as the file is this process's own
    }
    sys::show_memory(false);
    sys::be_called(c"init");
    sys::ignore_signals().map_err(at("ignoring signals"))?;
    let filter = options.filter.map(filter_in).transpose().map_err(at("reading the filter"))?;
    let link = if let Some(template) = &options.template {
        leave_standard_streams().map_err(at("leaving the standard streams"))?;
        let Some(given) = template::serve(template).map_err(at("being a template"))? else { return Ok(()) };
        let channel = namespaces::enter(given, template.id, options.root_capabilities);
        let channel = channel.map_err(|(step, error)| format!("{step}: {error}"))?;
        Link::open(&Channel::Fd(channel.into_raw_fd()))
    } else {
        let link = Link::open(&options.channel);
        leave_standard_streams().map_err(at("leaving the standard streams"))?;
        link
    };
    let link = link.map_err(at("opening the channel"))?;
    sys::bound_capabilities(options.root_capabilities);
    if std::process::id() != 1 {
        sys::adopt_orphans().map_err(at("adopting orphans"))?; // a first process has them anyway
    }
    if let Some(filter) = filter {
        sys::no_new_privileges().and_then(|()| sys::filter_calls(&filter)).map_err(at("filtering calls"))?;
    }
    let mut agent = Agent::new(link, options).map_err(at("starting"))?;
    agent.serve().map_err(|wrong| format!("the host broke the protocol: {}", wrong.0))
}

/// Read the system call filter from an inherited file.
fn filter_in(fd: i32) -> io::Result<Vec<u8>> {
    let mut filter = vec![0; MOST_FILTER];
    let length = File::from(sys::take_over(fd)?).read_at(&mut filter, 0)?;
    filter.truncate(length);
    Ok(filter)
}

/// Close standard streams, so that commands cannot access those of this process. Standard error stays open for the
/// agent's last messages.
fn leave_standard_streams() -> io::Result<()> {
    let nothing = File::options().read(true).write(true).open("/dev/null")?;
    for fd in [0, 1] {
        sys::put_at(&nothing, fd)?;
    }
    if nothing.as_raw_fd() < 3 {
        sys::keep_open(nothing.into())
    }
    Ok(())
}
