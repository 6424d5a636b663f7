"""Dockerfiles: supported instructions work, all others are errors with their line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.environments.images.archives import files_of, tar_of

from etude.environments.images import BadSource, ImageLimits, ImageRecord, ImageStore
from etude.environments.images.dockerfile import INSTRUCTIONS, args_of, expand, pairs, parse, unsupported
from etude.environments.images.dockerfile_build import build_from_dockerfile, ignored
from etude.errors import InputError, MachineError, StoreError

LIMITS = ImageLimits()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "src/pkg").mkdir(parents=True)
    (folder / "src/a.py").write_text("a")
    (folder / "src/pkg/b.py").write_text("b")
    (folder / "src/pkg/x.log").write_text("log")
    (folder / "one.txt").write_text("1")
    (folder / "two.txt").write_text("2")
    return folder


def build(store: ImageStore, context: Path, text: str, **more) -> ImageRecord:
    (context / "Dockerfile").write_text(text)
    return asyncio.run(build_from_dockerfile(store, context, **more))


def built(store: ImageStore, context: Path, text: str, **more) -> dict[str, str]:
    return files_of(store.root(build(store, context, text, **more).image.digest))


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        ("COPY one.txt /a.txt", {"a.txt": "1"}),
        ("COPY one.txt /d/", {"d": "/", "d/one.txt": "1"}),
        ("COPY one.txt two.txt d/", {"d": "/", "d/one.txt": "1", "d/two.txt": "2"}),
        ("COPY *.txt ./", {"one.txt": "1", "two.txt": "2"}),
        ('COPY ["one.txt", "with space"]', {"with space": "1"}),
        ("COPY src /app", {"app": "/", "app/a.py": "a", "app/pkg": "/", "app/pkg/b.py": "b", "app/pkg/x.log": "log"}),
        ("COPY src/pkg/../a.py /", {"a.py": "a"}),
        ("WORKDIR /w/x\nCOPY one.txt .", {"w": "/", "w/x": "/", "w/x/one.txt": "1"}),
        ("WORKDIR /w\nWORKDIR x\nCOPY one.txt y", {"w": "/", "w/x": "/", "w/x/y": "1"}),
        ("ENV D=/d E=e\nCOPY one.txt $D/${E}/${F:-f}", {"d": "/", "d/e": "/", "d/e/f": "1"}),
        ("COPY one.txt /a\nCOPY two.txt /a", {"a": "2"}),
        ("COPY --link one.txt /a", {"a": "1"}),
        ("ARG A=/x B=y\nCOPY one.txt $A/$B", {"x": "/", "x/y": "1"}),
        ("COPY <<EOF /a\nx\n # kept\n\nEOF", {"a": "x\n # kept\n\n"}),
        ("ENV V=1\nCOPY <<a <<-'b' /d/\n$V\na\n\t$V\n\tb", {"d": "/", "d/a": "1\n", "d/b": "$V\n"}),
        ("COPY \\\n  # said in between\n\n  one.txt \\  \n/a", {"a": "1"}),
        ("ENV A=/d\\\nd\nCOPY one.txt $A", {"dd": "1"}),
        ("COPY\tone.txt\t/a", {"a": "1"}),
        ('SHELL ["/bin/bash", "-c"]\nVOLUME /v\nHEALTHCHECK NONE\nMAINTAINER me\nCOPY one.txt /a', {"a": "1"}),
    ],
)
def test_files_are_copied_to_where_docker_would(store, context, copy, expected):
    assert built(store, context, f"# syntax=docker/dockerfile:1\nFROM scratch\n{copy}\n") == expected


def test_files_of_an_ignore_file_are_not_copied(store, context):
    (context / ".dockerignore").write_text("**/*.log\n*.txt\n!two.txt\nDockerfile\n.dockerignore\n")
    found = built(store, context, "FROM scratch\nCOPY . /\n")
    assert sorted(k for k, v in found.items() if v != "/") == ["src/a.py", "src/pkg/b.py", "two.txt"]


def test_a_copy_has_the_owner_and_permissions_it_is_given(store, context):
    record = build(store, context, "FROM scratch\nCOPY --chown=5:6 --chmod=750 one.txt /a\n")
    [entry] = [e for e in store.listing(record.image.digest) if e.path == "a"]
    assert (entry.mode, entry.uid, entry.gid) == (0o750, 5, 6)


def test_add_unpacks_a_local_archive_and_copy_does_not(store, context):
    (context / "a.tar").write_bytes(tar_of([("d", None), ("d/f", b"1")]))
    assert built(store, context, "FROM scratch\nADD a.tar /x\n") == {"x": "/", "x/d": "/", "x/d/f": "1"}
    record = build(store, context, "FROM scratch\nCOPY a.tar /x\n")
    assert (store.root(record.image.digest) / "x").read_bytes() == (context / "a.tar").read_bytes()


def test_settings_are_kept_in_the_record(store, context):
    text = """ARG BASE=scratch
FROM ${BASE}
ARG V=1
ENV A=$V B='$V' C="x $V" D=a\\ b
ENV OLD old style value
USER app
WORKDIR /w
LABEL k="v 1"
EXPOSE 80 443/tcp
ENTRYPOINT ["run"]
CMD serve --now
"""
    record = build(store, context, text, arguments={"V": "2"})
    image = record.image
    assert image.env == {"A": "2", "B": "$V", "C": "x 2", "D": "a b", "OLD": "old style value"}
    assert (image.user, image.workdir, record.labels, record.ports) == ("app", "/w", {"k": "v 1"}, ("80", "443/tcp"))
    assert (record.entrypoint, record.command) == (("run",), ("/bin/sh", "-c", "serve --now"))


def test_a_later_stage_takes_files_of_earlier_ones_and_of_images(store, context):
    store.name("base", build(store, context, "FROM scratch\nENV A=1\nCOPY one.txt /from-base\n"))
    text = """FROM scratch AS first
COPY two.txt /made
FROM first AS unused
COPY absent /never
FROM base
COPY --from=first /made /taken
COPY --from=0 /made /again
COPY --from=base /from-base /b
"""
    record = build(store, context, text)
    assert files_of(store.root(record.image.digest)) == {"again": "2", "b": "1", "from-base": "1", "taken": "2"}
    assert record.image.env == {"A": "1"}
    assert files_of(store.root(build(store, context, text, target="first").image.digest)) == {"made": "2"}


def test_a_step_taken_before_is_not_taken_again_and_a_changed_input_takes_it_again(store, context):
    text = "FROM scratch\nCOPY one.txt /a\n"
    first = build(store, context, text)
    before = (store.root(first.image.digest)).stat().st_ctime_ns
    assert build(store, context, text) == first
    assert store.root(first.image.digest).stat().st_ctime_ns == before
    (context / "one.txt").write_text("changed")
    assert build(store, context, text).image.digest != first.image.digest


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("COPY a b", 1, "before FROM"),
        ("FROM scratch\n\nCOPPY one.txt /", 3, "unknown instruction"),
        ("FROM scratch\n# c\nONBUILD RUN x", 3, "not supported"),
        ("FROM --platform=plan9/mips scratch", 1, "--platform=plan9"),
        ("FROM scratch\nCOPY --parents one.txt /", 2, "no flag --parents"),
        ("FROM scratch\nRUN --mount=type=secret,id=x x", 2, "--mount=type=secret"),
        ("FROM scratch\nRUN --network=host x", 2, "--network"),
        ("FROM scratch\nSHELL bash", 2, "without a JSON list"),
        ("FROM scratch\nENV A=${B%%.*}", 2, "'${B%%.*}' is not supported"),
        ("FROM scratch\nCOPY one.txt", 2, "a source and a destination"),
        ("FROM scratch\nCOPY absent /", 2, "absent does not exist"),
        ("FROM scratch\nCOPY *.none /", 2, "nothing matches"),
        ("FROM scratch\nCOPY ../secret /", 2, "../secret does not exist"),
        ("FROM scratch\nCOPY link /", 2, "link does not exist"),
        ("FROM scratch\nCOPY *.txt /a", 2, "to a file"),
        ("FROM scratch\nADD https://x/y /", 2, "URL"),
        ("FROM scratch\nCOPY --from=none /a /", 2, "no image"),
        ("FROM scratch\nCOPY --chown=app one.txt /", 2, "--chown"),
        ("FROM scratch\nCOPY --chown=1:x one.txt /", 2, "no 'x'"),
        ("FROM scratch\nCOPY --chmod=u+x one.txt /", 2, "--chmod"),
        ("FROM scratch\nENV A", 2, "without a value"),
        ("FROM scratch\nENV A=1 B", 2, "is not NAME=value"),
        ("FROM scratch\nENV A='1", 2, "quote"),
        ("FROM scratch\nARG 1=2", 2, "not a valid name"),
        ("FROM scratch\nCOPY <<EOF /a\nx\nEO", 2, "EOF does not end"),
        ("FROM absent", 1, "no image"),
        ("FROM scratch AS a\nFROM scratch AS a", 2, "second stage"),
        ("FROM a b c d", 1, "FROM takes"),
        ("FROM scratch\nUSER", 2, "without arguments"),
        ("FROM scratch \\\n AS x\nNOPE", 3, "unknown instruction"),
    ],
)
def test_an_unsupported_instruction_is_refused_with_its_line_and_a_hint(store, context, text, line, says):
    (context / "link").symlink_to("../../nowhere")
    with pytest.raises(BadSource) as caught:
        build(store, context, text)
    assert f"line {line}:" in caught.value.what
    assert says in str(caught.value)
    assert caught.value.hint


def test_the_kinds_of_dockerfile_that_benchmarks_have_are_read():
    stages = parse(BENCHMARK, LIMITS).stages
    assert [stage.base for stage in stages] == ["ubuntu:${UBUNTU}", "build"]
    assert [i.line for i in stages[0].instructions] == [4, 5, 6, 8, 17, 18, 19]
    run = stages[0].instructions[3]
    whole = run.args[0].split()
    assert " ".join(whole) == "apt-get update && apt-get install -y git && rm -rf /var/lib/apt/lists/*"
    script = stages[0].instructions[4]
    assert script.flags == {"mount": "type=cache,target=/root/.cache/pip"}
    assert script.args == ("pip install pytest==8.3.4",)
    assert stages[1].instructions[-2].documents[0].text == "import sys\nprint(sys.path)\n"
    assert stages[1].instructions[-2].documents[0].expands is False


BENCHMARK = """# syntax=docker/dockerfile:1
ARG UBUNTU=22.04
FROM --platform=linux/amd64 ubuntu:${UBUNTU} AS build
ENV DEBIAN_FRONTEND=noninteractive TZ='Etc/UTC'
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PATH="/opt/venv/bin:$PATH"

RUN apt-get update && \\
    # git is what tasks begin from
    apt-get install -y git \\

    # and nothing stays
    \\
    && rm -rf /var/lib/apt/lists/*


RUN --mount=type=cache,target=/root/.cache/pip pip install pytest==8.3.4
COPY --chown=app:app . /app
WORKDIR /app
FROM build
RUN cat <<'EOF' > /usr/bin/look && chmod +x /usr/bin/look
import sys
print(sys.path)
EOF
CMD ["bash"]
"""


def test_a_copy_belongs_to_a_user_whom_the_image_knows(store, context):
    (context / "passwd").write_text("root:x:0:0::/:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n")
    (context / "group").write_text("staff:x:50:\n")
    text = "FROM scratch\nARG WHO=app\nCOPY passwd group /etc/\nCOPY --chown=$WHO:staff one.txt /a\n"
    text += "COPY --chown=app <<EOF /b\nEOF\n"
    record = build(store, context, text)
    found = {e.path: (e.mode, e.uid, e.gid) for e in store.listing(record.image.digest)}
    assert found["a"][1:] == (1000, 50)
    assert found["b"] == (0o644, 1000, 1000)
    with pytest.raises(BadSource, match="line 2: --chown=app"):
        build(store, context, "FROM scratch\nCOPY --chown=app one.txt /a\n")


def test_an_ignored_file_is_matched_by_no_pattern_and_refused_by_name(store, context):
    (context / ".dockerignore").write_text("two.txt\n")
    assert built(store, context, "FROM scratch\nCOPY *.txt /d/\n") == {"d": "/", "d/one.txt": "1"}
    with pytest.raises(BadSource, match=r"line 2: two.txt is left out by .dockerignore"):
        build(store, context, "FROM scratch\nCOPY two.txt /d/\n")


def test_a_path_that_no_image_names_is_the_usual_one_and_not_empty(store, context):
    assert build(store, context, "FROM scratch\nENV PATH=/venv/bin:$PATH\n").image.env == {
        "PATH": "/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    }


def test_an_argument_that_the_file_does_not_have_is_an_error_with_the_nearest(store, context):
    with pytest.raises(InputError, match="no ARG VERSOIN") as caught:
        build(store, context, "FROM scratch\nARG VERSION=1\n", arguments={"VERSOIN": "2"})
    assert "VERSION" in caught.value.hint


def test_arguments_of_the_platform_are_what_this_host_is(store, context):
    text = "FROM --platform=$TARGETPLATFORM scratch\nARG TARGETARCH\nENV A=$TARGETARCH\n"
    assert build(store, context, text).image.env["A"] in ("amd64", "arm64", os.uname().machine)


def test_an_archive_of_a_kind_that_is_not_unpacked_is_not_passed_over(store, context):
    (context / "a.tar.xz").write_bytes(b"\xfd7zXZ\0" + bytes(20))
    with pytest.raises(BadSource, match="compressed with xz"):
        build(store, context, "FROM scratch\nADD a.tar.xz /x/\n")


def test_a_source_leads_out_of_the_folder_by_no_link(tmp_path, store, context):
    (tmp_path / "secret").write_text("s")
    (context / "out").symlink_to(tmp_path)
    (context / "src/link").symlink_to(tmp_path / "secret")
    with pytest.raises(BadSource):
        build(store, context, "FROM scratch\nCOPY out/secret /\n")
    found = built(store, context, "FROM scratch\nCOPY src /\n")
    assert found["link"] == f"->{tmp_path}/secret"
    assert "s" not in found.values()


def test_run_without_machines_is_the_hosts_failure_and_not_the_files(store, context):
    with pytest.raises(MachineError, match="RUN needs a machine"):
        build(store, context, "FROM scratch\nRUN true\n")


@pytest.mark.parametrize("text", ["", "# nothing\n", "ARG X=1\n"])
def test_a_file_without_from_is_an_error(store, context, text):
    with pytest.raises(BadSource, match="has no FROM"):
        build(store, context, text)


def test_an_unknown_target_and_an_absent_file_are_errors(store, context):
    with pytest.raises(InputError, match="no stage"):
        build(store, context, "FROM scratch AS base", target="bose")
    os.unlink(context / "Dockerfile")
    with pytest.raises(BadSource, match="no Dockerfile"):
        asyncio.run(build_from_dockerfile(store, context))


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*INSTRUCTIONS, "from", "ONBUILD", "X", "#", ""]),
            st.text(st.sampled_from("ab=$ {}:-+\"'\\[],/.\n\t1é\0<"), max_size=30),
        ),
        max_size=8,
    )
)
def test_any_text_is_parsed_or_refused(lines):
    text = "\n".join(f"{name} {rest}" for name, rest in [("FROM", "scratch"), *lines])
    with contextlib.suppress(BadSource):
        for stage in parse(text, LIMITS).stages:
            for instruction in stage.instructions:
                (pairs if instruction.name in ("ENV", "LABEL") else args_of)(instruction, {"a": "1", "b": "$a"})
                expand(instruction.args[0], {"a": "1"})
                unsupported(instruction.args[0])


@pytest.mark.parametrize("name", ["Dockerfile", ".dockerignore"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_build_reads_no_file_outside_of_its_folder(tmp_path, store, context, name, kind):
    (context / "Dockerfile").write_text("FROM scratch\nCOPY . /all\n")
    (tmp_path / "secret").write_text("hunter2 *")
    (context / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(context / name)
    elif kind == "folder":
        (context / name).mkdir()
    else:
        (context / name).symlink_to(tmp_path / "secret")
    if kind == "pipe" and name == ".dockerignore":
        with pytest.raises(StoreError, match="is a device, a pipe or a socket"):
            asyncio.run(build_from_dockerfile(store, context))
    elif name == "Dockerfile":
        with pytest.raises(BadSource, match="no Dockerfile") as caught:
            asyncio.run(build_from_dockerfile(store, context))
        assert "hunter2" not in str(caught.value)
    else:
        asyncio.run(build_from_dockerfile(store, context))


SEGMENTS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map("/".join)


@settings(max_examples=400)
@given(st.text("ab*?/", max_size=9), SEGMENTS)
def test_an_ignore_pattern_means_what_trying_everything_finds(pattern: str, path: str) -> None:
    pieces, tried = re.findall(r"\*\*+/|\*\*+|.", pattern.strip("/")), ""
    for at, piece in enumerate(pieces):
        starts = not at or pieces[at - 1].endswith("/")
        many = "(?:[^/]+/)*" if starts else ".*/"
        meaning = {"*": "[^/]*", "?": "[^/]"}.get(piece, piece)
        tried += (many if piece[-1] == "/" else ".*") if piece.startswith("**") else meaning
    assert ignored(f"x\n{pattern}")(path) is bool(re.fullmatch(f"{tried}(?:/.*)?", path) and pattern.strip("/"))


@pytest.mark.parametrize(
    "pattern", ["*a" * 60 + "b", "**/a/" * 60 + "b", "**a" * 60 + "b", "a**/" * 60 + "b", "*a?*" * 60]
)
def test_no_ignore_pattern_takes_long(pattern: str) -> None:
    paths = ["a" * 250, "a/" * 120 + "c", "/".join(["a" * 200] * 5) + "/c"]
    imports = "from etude.environments.images.dockerfile_build import ignored"
    code = f"{imports}\nprint([*map(ignored({pattern!r}), {paths!r})])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=True, text=True)
    assert found.stdout.startswith("[")


def test_an_ignore_file_of_any_number_of_lines_is_refused(store, context):
    (context / ".dockerignore").write_text("x\n" * 1001)
    with pytest.raises(BadSource, match="1001 lines"):
        built(store, context, "FROM scratch\nCOPY . /\n")
