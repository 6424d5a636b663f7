"""The arguments of ``etude machines``. Imports no library."""

from __future__ import annotations

from pathlib import Path

from etude.cli.arguments import (
    Commands,
    Parser,
    add,
    add_backend,
    add_backend_and_jobs,
    add_unbounded_memory,
    duration,
    group,
    output_file,
    port,
    positive,
)

_IMAGES = "store of machine images (default: ~/.local/share/etude/images)"


def add_machine_commands(commands: Commands[Parser]) -> None:
    """Add ``etude machines`` and its commands."""
    machines = group(commands, "machines", "isolated machines: probe, run, serve, check, images")
    add(machines, "probe", "machines:probe", "show which backends work on this host, and why others do not")
    run = add(machines, "run", "machines:run", "run a command in a machine; the exit code is the command's")
    shell = add(machines, "shell", "machines:shell", "open a shell in a machine")
    for parser in (run, shell):
        parser.add_argument("--image", metavar="IMAGE", help="name or digest (default: the backend's own image)")
        parser.add_argument("--store", type=Path, metavar="DIR", help=_IMAGES)
        parser.add_argument("--files", type=Path, metavar="DIR", help="files to copy into the working directory")
        parser.add_argument("--user", default="", help="user in the machine (default: the first user it has)")
        add_unbounded_memory(parser)
    run.add_argument(
        "--deadline",
        type=duration,
        default="10m",
        metavar="TIME",
        help="kill the command after this time (default: %(default)s)",
    )
    run.add_argument("argv", nargs="+", metavar="WORD", help="the command and its arguments, after --")
    bench = add(machines, "bench", "machines:bench", "measure how long machines take to fork and to run commands")
    bench.add_argument(
        "--num", type=positive, default=100, metavar="N", help="number of machines (default: %(default)s)"
    )
    bench.add_argument("--json", action="store_true", help="print JSON")
    for parser in (run, shell, bench):
        add_backend(parser)
    serve = add(machines, "serve", "machines:serve", "offer machines over HTTP, with E2B's API")
    add_backend(serve)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=port, default=3000, help="port to listen on (default: %(default)s)")
    serve.add_argument("--keys", type=Path, metavar="FILE", help="API keys and quotas (default: one new random key)")
    serve.add_argument("--templates", type=Path, metavar="FILE", help="templates of machines, in addition to `base`")
    serve.add_argument("--domain", default="", help="domain of your proxy: machines are at 49983-ID.DOMAIN")
    serve.add_argument(
        "--drain",
        type=duration,
        default="30s",
        metavar="TIME",
        help="time for running machines after SIGTERM (default: %(default)s)",
    )
    add_unbounded_memory(serve)
    check = add(
        machines, "check", "machines_check:check", "run every attack; exit code 1 if an unexpected one succeeds"
    )
    add_backend_and_jobs(check)
    check.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="one attack, or one row of attacks (repeatable)"
    )
    check.add_argument("--out", type=output_file, metavar="FILE.json", help="write all findings")
    check.add_argument("--verbose", action="store_true", help="print what stopped each attack")
    parity = add(machines, "parity", "machines_check:parity", "measure whether two kinds of machines can be told apart")
    parity.add_argument(
        "a", metavar="A", help="a backend; plain: processes of this host; booted: microVMs that were never forked"
    )
    parity.add_argument("b", metavar="B", help="another one: the kind that your product uses")
    parity.add_argument(
        "--machines", type=positive, default=20, metavar="N", help="machines of each kind (default: %(default)s)"
    )
    parity.add_argument("--out", type=output_file, metavar="FILE.json", help="write the result")
    _add_image_commands(machines)


def _add_image_commands(machines: Commands[Parser]) -> None:
    image = group(machines, "image", "build and manage images of machines")
    build = add(image, "build", "machines_image:build", "build an image and print its digest")
    build.add_argument("source", metavar="SOURCE", help="a folder, repository, Dockerfile, OCI image, or debian:SUITE")
    build.add_argument("--name", help="name of the image")
    build.add_argument(
        "--from",
        dest="kind",
        metavar="KIND",
        help="kind of SOURCE: directory, repository, dockerfile, oci, debian (default: detected)",
    )
    build.add_argument("--keep-setuid", action="store_true", help="keep set-user-id bits")
    build.add_argument("--workdir", metavar="DIR", help="directory in which commands start (folder, repository)")
    build.add_argument("--commit", default="HEAD", help="commit of a repository (default: %(default)s)")
    build.add_argument("--parent", metavar="IMAGE", help="image to which a repository is added")
    build.add_argument("--file", default="Dockerfile", help="name of the Dockerfile (default: %(default)s)")
    build.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="an ARG of the Dockerfile (repeatable)"
    )
    build.add_argument("--target", default="", metavar="STAGE", help="stage of the Dockerfile (default: the last)")
    build.add_argument(
        "--backend", default="namespace", metavar="NAME", help="machines for RUN instructions (default: %(default)s)"
    )
    add_unbounded_memory(build)
    build.add_argument(
        "--allow", action="append", default=[], metavar="HOST", help="host that RUN may access, logged (repeatable)"
    )
    build.add_argument("--tag", default="", help="tag of the image in a saved archive")
    build.add_argument("--package", action="append", default=[], metavar="P", help="Debian package (repeatable)")
    build.add_argument(
        "--mirror", default="", metavar="URL", help="Debian mirror (default: the one that apt uses here)"
    )
    packages = add(
        image,
        "packages",
        "machines_image:packages",
        "store packages, so that RUN can use pip, npm, apt without a network",
    )
    packages.add_argument("packages", nargs="*", metavar="P", help="pip:NAME==VERSION, npm:N@V, apt:N=V, or a wheel")
    packages.add_argument("--dependencies", action="store_true", help="also store the dependencies of pip packages")
    listing = add(image, "list", "machines_image:list_images", "list the images in the store")
    show = add(image, "show", "machines_image:show", "show the record of an image and its origin")
    show.add_argument("--verify", action="store_true", help="verify every file of the image first")
    remove = add(image, "remove", "machines_image:remove", "remove a name; the image is deleted with its last name")
    for parser in (show, remove):
        parser.add_argument("image", metavar="IMAGE", help="a name or a digest")
    collect = add(image, "collect", "machines_image:collect", "delete every image without a name")
    for parser in (build, packages, listing, show, remove, collect):
        parser.add_argument("--store", type=Path, metavar="DIR", help=_IMAGES)
    microvm = add(image, "microvm", "machines_image:microvm", "build the guest image of microVMs from Debian packages")
    microvm.add_argument("--mirror", metavar="URL", help="Debian archive, or a snapshot of it (default: Debian's)")
    microvm.add_argument("--suite", default="bookworm", help="with --mirror: the suite (default: %(default)s)")
    microvm.add_argument(
        "--folder", type=Path, metavar="DIR", help="where guest images are stored (default: ~/.cache/etude/images)"
    )
