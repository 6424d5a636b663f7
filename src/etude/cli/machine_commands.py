"""``etude machines``: its commands and what they are given."""

from __future__ import annotations

import argparse
from pathlib import Path

from etude.cli.arguments import Commands, Parser, add, duration, port, positive, written


def backend_and_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="namespace", metavar="B", help="which machines (default: namespace)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="how many machines at once (default: two a core)")


def accepts_unbounded(parser: argparse.ArgumentParser) -> None:
    """For commands in whose machines code runs that is not etude's own."""
    what = "go on where nothing bounds the memory of a whole machine"
    parser.add_argument("--unbounded-memory", action="store_true", help=what)


def machine_commands(commands: Commands[Parser]) -> None:
    machines = commands.add_parser("machines", help="isolated machines").add_subparsers(
        required=True, metavar="COMMAND"
    )
    _try_commands(machines)
    serve = add(machines, "serve", "machines_serve:serve", "offer machines over HTTP, as E2B does")
    serve.add_argument("--backend", default="namespace", metavar="NAME", help="what they are (default: namespace)")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=port, default=3000)
    serve.add_argument("--keys", type=Path, metavar="FILE", help="API keys and their quotas (default: one, drawn now)")
    serve.add_argument("--templates", type=Path, metavar="FILE", help="what machines are made from, beside `base`")
    serve.add_argument("--domain", default="", help="machines are at 49983-ID.DOMAIN, through a proxy of yours")
    serve.add_argument("--drain", type=duration, default="30s", metavar="TIME", help="left to machines after SIGTERM")
    accepts_unbounded(serve)
    check = add(machines, "check", "machines_check:check", "try every cheat for real; exit code 1 when one succeeds")
    backend_and_jobs(check)
    check.add_argument("--only", action="append", default=[], metavar="NAME", help="a cheat or a row (repeatable)")
    check.add_argument("--out", type=written, metavar="FILE.json", help="write every finding there")
    check.add_argument("--verbose", action="store_true", help="tell what stopped each")
    parity = add(machines, "parity", "machines_check:parity", "can machines be told apart, and by what")
    parity.add_argument(
        "a", metavar="A", help="a backend; plain: processes of this host; booted: microVMs never forked"
    )
    parity.add_argument("b", metavar="B", help="likewise: your product's kind")
    parity.add_argument("--machines", type=positive, default=20, metavar="N", help="of each (default: %(default)s)")
    parity.add_argument("--out", type=written, metavar="FILE.json", help="write the result there")
    _image_commands(machines)


def _try_commands(machines: Commands[Parser]) -> None:
    add(machines, "probe", "machines_probe:probe", "which backends work here, and why the others do not")
    run = add(machines, "run", "machines_run:run", "run a command in a machine; its exit code is the command's")
    shell = add(machines, "shell", "machines_run:shell", "look into a machine: a shell in it")
    for parser in (run, shell):
        parser.add_argument("--image", metavar="IMAGE", help="a name or a digest (default: the backend's own)")
        parser.add_argument(
            "--store", type=Path, metavar="DIR", help="of images (default: ~/.local/share/etude/images)"
        )
        parser.add_argument("--files", type=Path, metavar="DIR", help="what lies in its working directory")
        parser.add_argument("--user", default="", help="who does it (default: the first that the machine has)")
        accepts_unbounded(parser)
    run.add_argument("--deadline", type=duration, default="10m", metavar="TIME", help="(default: %(default)s)")
    run.add_argument("words", nargs="+", metavar="WORD", help="the command, after --")
    bench = add(machines, "bench", "machines_probe:bench", "what forking machines and running commands costs here")
    bench.add_argument("--num", type=positive, default=100, metavar="N", help="machines (default: %(default)s)")
    bench.add_argument("--json", action="store_true", help="print the numbers alone")
    for parser in (run, shell, bench):
        parser.add_argument("--backend", default="namespace", metavar="B", help="which machines (default: namespace)")


def _image_commands(machines: Commands[Parser]) -> None:
    image = machines.add_parser("image", help="what machines are made from").add_subparsers(
        required=True, metavar="COMMAND"
    )
    build = add(image, "build", "machines_image:build", "make an image, and say its digest")
    build.add_argument("source", metavar="SOURCE", help="a folder, repository, Dockerfile, OCI image, or debian:SUITE")
    build.add_argument("--name", help="what it is called from now on")
    build.add_argument("--from", dest="kind", metavar="KIND", help="what SOURCE is, where that does not show")
    build.add_argument("--keep-setuid", action="store_true", help="keep set-user-id bits")
    build.add_argument("--workdir", metavar="DIR", help="where commands start (folder, repository)")
    build.add_argument("--commit", default="HEAD", help="of a repository (default: HEAD)")
    build.add_argument("--parent", metavar="IMAGE", help="what a repository is put into")
    build.add_argument("--file", default="Dockerfile", help="the Dockerfile's name in the folder")
    build.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="an ARG of it (repeatable)")
    build.add_argument("--target", default="", metavar="STAGE", help="which stage of it (default: the last)")
    build.add_argument("--backend", default="namespace", metavar="B", help="whose machines do its RUNs")
    accepts_unbounded(build)
    build.add_argument(
        "--allow", action="append", default=[], metavar="HOST", help="what RUN may reach, logged (repeatable)"
    )
    build.add_argument("--tag", default="", help="which image of a saved archive")
    build.add_argument("--package", action="append", default=[], metavar="P", help="of Debian (repeatable)")
    build.add_argument("--mirror", default="", metavar="URL", help="of Debian (default: the one apt uses here)")
    packages = add(
        image, "packages", "machines_image:packages", "keep packages for RUN: pip, npm and apt without a net"
    )
    packages.add_argument("packages", nargs="*", metavar="P", help="pip:NAME==VERSION, npm:N@V, apt:N=V, or a wheel")
    packages.add_argument("--dependencies", action="store_true", help="what pip's need, too")
    listing = add(image, "list", "machines_image:listed", "every image of the store")
    show = add(image, "show", "machines_image:show", "what an image is and where it came from")
    show.add_argument("--verify", action="store_true", help="read every file of it first")
    remove = add(image, "remove", "machines_image:remove", "take away a name, and the image with the last one")
    for parser in (show, remove):
        parser.add_argument("image", metavar="IMAGE", help="a name or a digest")
    collect = add(image, "collect", "machines_image:collect", "remove every image that no name leads to")
    for parser in (build, packages, listing, show, remove, collect):
        parser.add_argument("--store", type=Path, metavar="DIR", help="(default: ~/.local/share/etude/images)")
    microvm = add(
        image, "microvm", "machines_image:microvm", "build the guest of virtual machines from Debian's packages"
    )
    microvm.add_argument("--mirror", metavar="URL", help="of Debian's archive, or a snapshot of it (default: Debian's)")
    microvm.add_argument("--suite", default="bookworm", help="with --mirror (default: bookworm)")
    microvm.add_argument(
        "--folder", type=Path, metavar="DIR", help="where images are kept (default: ~/.cache/etude/images)"
    )
