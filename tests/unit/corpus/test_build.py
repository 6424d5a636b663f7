"""Builds: the same bytes after a kill and on any number of processes, and errors that say what to do."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.small_disk import fill, small_disk
from tests.unit.corpus import make

from etude import cli
from etude.corpus import Corpus, CorpusConfig, build, build_corpus, check_corpus, sources
from etude.corpus.heldout import heldout_texts
from etude.errors import ConfigError, CorpusError, Exit, InputError, NoSource, PluginError
from etude.records.task import Split
from etude.tasks.written import FollowingSource


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CorpusConfig:
    """A config over a folder with a duplicate, a near duplicate, a secret, a file that is not text, and two phases."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 1_500)
    folder = make.texts(tmp_path / "texts")
    first = (folder / "module_1.py").read_text()
    (folder / "copy.py").write_text(first.replace("\n", "  \r\n"))
    (folder / "near.py").write_text(first.replace("function_1_0", "function_1_9"))
    (folder / "secret.py").write_text(first + 'token = "ghp_aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC2dF4hJ6"\n')
    (folder / "latin.py").write_bytes(b"# caf\xe9\n" * 9)
    more = tmp_path / "more.jsonl"
    more.write_text(
        "".join(json.dumps({"text": f"Line {i} of a text about number {i * 17}."}) + "\n" for i in range(40))
    )
    own = {"name": "own", "kind": {"kind": "folder", "path": str(folder)}, "max_epochs": 2.0}
    lines = {"name": "lines", "kind": {"kind": "jsonl", "files": [str(more)]}}
    phases = [
        {"name": "one", "tokens": 1_500, "mix": {"own": 3, "lines": 1}},
        {"name": "two", "tokens": 1_000},
    ]
    return make.config(
        tmp_path, sources=[own, lines], phases=phases, fim={"rate": 0.5}, shard_tokens=1_000, near={"threshold": 0.7}
    )


def test_a_corpus_has_what_its_manifest_says(config, tmp_path):
    corpus = build_corpus(config, tmp_path / "out")
    own = corpus.manifest.sources["own"]
    assert own.dropped == {"exact-duplicate": 1, "near-duplicate": 1, "not-utf-8": 1, "secret": 1}
    assert own.documents == own.kept + 4 == 10
    assert len(list(check_corpus(corpus))) == sum(len(phase.shards) for phase in corpus.manifest.phases) > 2
    one, two = corpus.manifest.phases
    assert 1_500 <= one.tokens < 2_200
    assert 1_000 <= two.tokens < 1_700
    assert one.sources["own"].tokens > 2 * one.sources["lines"].tokens
    for phase in (one, two):
        found = [name["source"] for shard in phase.shards for name in corpus.provenance(shard)]
        assert {name: found.count(name) for name in phase.sources} == {
            name: drawn.documents for name, drawn in phase.sources.items()
        }
    again = build_corpus(config, tmp_path / "out")  # is there already
    assert again.manifest == corpus.manifest


def test_documents_decode_to_the_texts_with_fim_put_in_order(config, tmp_path):
    corpus = build_corpus(config, tmp_path / "out")
    encoder = build.Encoder.load(config.tokenizer, config.fim, seed=0)
    rearranged = 0
    for phase in corpus.manifest.phases:
        for facts, shard in zip(phase.shards, corpus.shards(phase.name), strict=True):
            for index, origin in enumerate(corpus.provenance(facts)):
                text = encoder.tokenizer.decode(shard.document(index).tolist(), special=True)
                assert text.endswith(make.END)
                if origin["source"] != "own":
                    continue
                parts = text.removesuffix(make.END).split(make.FIM[0])
                if len(parts) == 2:
                    rearranged += 1
                    prefix, rest = parts[1].split(make.FIM[1])
                    suffix, middle = rest.split(make.FIM[2])
                    text = prefix + middle + suffix + make.END  # in SPM the prefix is in the middle
                assert text == (tmp_path / "texts" / origin["path"]).read_bytes().decode() + make.END
    assert rearranged


def test_a_document_that_comes_again_has_another_fim_split_in_each_epoch(tmp_path):
    make.texts(tmp_path / "texts", 3)
    kind = {"kind": "folder", "path": str(tmp_path / "texts")}
    sources = [{"name": "own", "kind": kind, "max_epochs": 4.0}]
    phases = [{"name": "one", "tokens": 4_000}]
    config = make.config(tmp_path, sources=sources, phases=phases, fim={"rate": 0.9}, shard_tokens=500)
    corpus = build_corpus(config, tmp_path / "out")
    encoder = build.Encoder.load(config.tokenizer, config.fim, seed=0)
    expected = {
        name: sorted(
            encoder.encode((tmp_path / "texts" / name).read_text(), f"own/{name}", e).tolist() for e in range(4)
        )
        for name in ("module_0.py", "module_1.py", "module_2.py")
    }
    found: dict[str, list[list[int]]] = {name: [] for name in expected}
    (phase,) = corpus.manifest.phases
    for facts, shard in zip(phase.shards, corpus.shards("one"), strict=True):
        for index, origin in enumerate(corpus.provenance(facts)):
            found[origin["path"]].append(shard.document(index).tolist())
    assert {name: sorted(one) for name, one in found.items()} == expected
    assert len({tuple(one) for every in found.values() for one in every}) > 9  # of 12
    assert phase.sources["own"].tokens == phase.tokens == sum(len(one) for every in found.values() for one in every)
    assert len(list(check_corpus(corpus))) == len(phase.shards) > 4


def test_processes_do_not_change_a_byte(config, tmp_path):
    build_corpus(config, tmp_path / "one")
    build_corpus(config, tmp_path / "two", jobs=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


class Killed(BaseException):
    """Ends a build as a kill would: nothing of it is cleaned up by the code that is interrupted."""


def counted(monkeypatch: pytest.MonkeyPatch, most: int) -> Callable[[], int]:
    """Raise `Killed` at a call of one of the functions that change the disk, after `most` of them."""
    calls = [0]

    def count() -> None:
        calls[0] += 1
        if calls[0] > most:
            raise Killed

    for place, name in ((Path, "rename"), (Path, "replace"), (Path, "mkdir"), (os, "fsync"), (build.shutil, "rmtree")):
        real = getattr(place, name)

        def wrapped(*arguments: Any, real: Callable[..., Any] = real, **options: Any) -> Any:
            count()
            done = real(*arguments, **options)
            count()
            return done

        monkeypatch.setattr(place, name, wrapped)
    return lambda: calls[0]


def test_a_build_that_is_killed_anywhere_goes_on_and_ends_with_the_same_bytes(config, tmp_path, monkeypatch):
    build_corpus(config, tmp_path / "whole")
    expected = digests(tmp_path / "whole")
    with monkeypatch.context() as patch:
        used = counted(patch, 10**9)
        build_corpus(config, tmp_path / "counted")
        total = used()
    assert total > 30
    for number, most in enumerate(random.Random(0).sample(range(total), 6)):
        folder = tmp_path / f"killed-{number}"
        with monkeypatch.context() as patch:
            counted(patch, most)
            with pytest.raises(Killed):
                build_corpus(config, folder)
        build_corpus(config, folder)
        assert digests(folder) == expected, most


def test_a_change_between_a_kill_and_the_rest_of_a_build_is_an_error(config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        counted(patch, 20)
        with pytest.raises(Killed):
            build_corpus(config, tmp_path / "out")
    with pytest.raises(InputError, match="its build has not ended"):
        Corpus.open(tmp_path / "out")
    (tmp_path / "texts" / "module_2.py").write_text("changed = True\n" * 4)
    with pytest.raises(CorpusError, match="cannot go on") as error:
        build_corpus(config, tmp_path / "out")
    assert error.value.facts == "changed: the sources"


def test_a_full_disk_is_an_error_and_the_build_goes_on_with_room(config, tmp_path):
    build_corpus(config, tmp_path / "whole")
    with small_disk(tmp_path / "disk", "600k") as disk:
        ballast = fill(disk, 30_000)
        with pytest.raises(CorpusError, match="the disk is full") as error:
            build_corpus(config, disk / "out")
        assert "run the same command again" in error.value.hint
        ballast.unlink()
        build_corpus(config, disk / "out")
        assert digests(disk / "out") == digests(tmp_path / "whole")


def test_held_out_files_and_the_answers_of_tasks_stay_out(tmp_path):
    make.texts(tmp_path / "texts")
    leak = """
def weighted_median(values, weights):
    total, seen = sum(weights), 0
    for value, weight in sorted(zip(values, weights)):
        seen = seen + weight
        if 2 * seen >= total:
            return value
    raise ValueError("there is no value")


def spread(values):
    centre = weighted_median(values, [1] * len(values))
    return max(abs(value - centre) for value in values)
"""
    (tmp_path / "answer.py").write_text(leak)
    renamed = leak.replace("values", "xs").replace("weight", "w").replace("seen", "s").replace("    ", "\t")
    (tmp_path / "texts" / "leak.py").write_text(f"import os\n\n{renamed}\nprint(os)\n")
    tasks = {"kind": "etude.tasks.repair.source:RepairSource", "seed": 0, "functions_per_file": 3}
    heldout = {"files": [str(tmp_path / "answer.py")], "tasks": [tasks], "num_tasks": 2}
    corpus = build_corpus(make.config(tmp_path, heldout=heldout), tmp_path / "out")
    own = corpus.manifest.sources["own"]
    assert own.dropped == {"held-out": 1}
    assert own.examples["held-out"] == [f"leak.py has {tmp_path / 'answer.py'}"]
    assert corpus.manifest.heldout.texts + len(corpus.manifest.heldout.too_short) > 4


def test_held_out_tasks_are_named_as_in_a_run_and_have_its_seed(tmp_path):
    source = FollowingSource(7)
    instruction = source.task(Split.HELDOUT, 0).instruction
    found = {}
    for seed in (7, 8):
        heldout = {"tasks": ["following"], "num_tasks": 5, "tasks_seed": seed}
        found[seed] = {one.text for one in heldout_texts(make.config(tmp_path, heldout=heldout).heldout)}
    assert instruction in found[7]
    assert instruction not in found[8]


@pytest.mark.parametrize(
    ("heldout", "says"),
    [
        ({"tasks": ["repair"], "num_tasks": 2}, "heldout.tasks: 'repair': 30 of 30 held-out texts are too short"),
        ({"files": ["long.md", "short.md"]}, "heldout.files: 'short.md': 1 of 1 held-out texts are too short"),
    ],
)
def test_a_setting_that_holds_out_nothing_is_refused(heldout, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make.texts(tmp_path / "texts", 2)
    Path("long.md").write_text(" ".join(f"word{i}" for i in range(40)))
    Path("short.md").write_text("only a few words")
    with pytest.raises(ConfigError) as error:
        build_corpus(make.config(tmp_path, heldout=heldout), tmp_path / "out")
    assert says in str(error.value)
    assert "fewer than 23 tokens of code or 15 words" in error.value.facts
    assert "functions_per_file = 3" in error.value.hint or "longer texts" in error.value.hint


def test_the_share_of_held_out_texts_that_are_too_short_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make.texts(tmp_path / "texts", 2)
    Path("long.md").write_text(" ".join(f"word{i}" for i in range(40)))
    Path("short.md").write_text("only a few words")
    build_corpus(make.config(tmp_path, heldout={"files": ["*.md"]}), tmp_path / "out")
    assert cli.main(["corpus", "look", str(tmp_path / "out")]) == Exit.DONE
    assert "1 of 2 held-out texts are too short to be found, among them short.md" in capsys.readouterr().out


def test_a_corpus_is_not_built_in_a_file(tmp_path):
    make.texts(tmp_path / "texts", 2)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(InputError, match="no corpus can be built in") as error:
            build_corpus(make.config(tmp_path), folder)
        assert error.value.facts == f"{tmp_path / 'file'} is a file"
        assert error.value.hint


def test_licences_of_dropped_documents_are_named_if_none_is_left(tmp_path):
    make.texts(tmp_path / "texts", 2)
    kind = {"kind": "folder", "path": str(tmp_path / "texts")}
    sources = [{"name": name, "kind": kind, "licence": licence} for name, licence in (("a", "MIT"), ("b", "ISC"))]
    with pytest.raises(CorpusError, match="no document is left") as error:
        build_corpus(make.config(tmp_path, sources=sources, licences=["MTI"]), tmp_path / "out")
    assert "dropped: {'licence': 4}; no document has MTI, their licences are MIT (2), ISC (2)" in error.value.facts
    assert "did you mean 'MIT'?" in error.value.hint


def test_lines_are_shown_by_file_and_number(tmp_path, capsys):
    words = [f"value {i} is {i * i} and its name is number {i:03}" for i in range(3)]
    rows = [json.dumps({"text": text}) + "\n" for text in words]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rows.jsonl").write_text(rows[0] + "not JSON\n" + rows[1])
    (tmp_path / "own.jsonl").write_text(json.dumps({"text": words[2], "id": "own.jsonl:1"}) + "\n")
    kind = {"kind": "jsonl", "files": [str(tmp_path / "a" / "*.jsonl"), str(tmp_path / "own.jsonl")]}
    sources = [{"name": "rows", "kind": kind}]
    build_corpus(make.config(tmp_path, sources=sources, near={"threshold": 1.0}), tmp_path / "out")

    def shown() -> str:
        assert cli.main(["corpus", "look", str(tmp_path / "out"), "--documents", "9"]) == Exit.DONE
        return capsys.readouterr().out.replace("\n", "")

    path = tmp_path / "a" / "rows.jsonl"
    out = shown()
    assert all(f"{path}, line {line}" in out for line in (1, 2, 3))
    assert "rows own.jsonl:1, " in out, "an id of its own, where no line begins"
    path.write_text(rows[0][3:])
    assert f"rows.jsonl:{len(rows[0]) + 9}" in shown(), "the file has changed"


def test_a_plug_in_is_a_source_and_its_nonsense_is_named(tmp_path):
    (tmp_path / "own.md").write_text("From: someone\nThe machine did not start. Press the button again.\n")
    kind = {"kind": "examples.plugins.documents:Tickets", "path": str(tmp_path)}
    corpus = build_corpus(make.config(tmp_path, sources=[{"name": "desk", "kind": kind}]), tmp_path / "out")
    assert corpus.manifest.sources["desk"].licences == {"LicenseRef-own": 1}
    for path, says in (
        ("etude.corpus.documents:Dropped", "is missing"),
        ("etude.corpus.sources:Divided", "its constructor raised TypeError"),
    ):
        config = make.config(tmp_path, sources=[{"name": "desk", "kind": {"kind": path}}])
        with pytest.raises((ConfigError, PluginError)) as error:
            build_corpus(config, tmp_path / "other")
        assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"licenses": ["MIT"]}, "did you mean 'licences'?"),
        ({"tokenizer": {"path": "missing.json"}}, "no tokenizer at missing.json"),
        ({"fim": {"rate": 0.5, "tokens": ["<a>", "<b>", "<c>"]}}, "lacks the sentinel tokens"),
        ({"sources": []}, "there is no source"),
        ({"licences": []}, "licences is empty"),
        ({"heldout": {"tasks": ["repare"]}}, "no task source 'repare'"),
        ({"phases": [{"name": "a", "tokens": 9, "mix": {"onw": 1}}]}, "did you mean 'own'?"),
        ({"quality": {"min_chars": 100_000}}, "no document is left"),
    ],
)
def test_a_config_that_cannot_be_built_is_an_error_with_a_hint(changes, says, tmp_path):
    make.texts(tmp_path / "texts", 2)
    with pytest.raises((ConfigError, CorpusError, NoSource)) as error:
        build_corpus(make.config(tmp_path, **changes), tmp_path / "out")
    assert says in str(error.value)
    assert error.value.hint


def test_a_tokenizer_without_sentinels_or_end_is_refused(tmp_path):
    make.texts(tmp_path / "texts", 2)
    make.tokenizer(tmp_path / "plain.json", [make.END])
    make.tokenizer(tmp_path / "endless.json", ["<|end|>"])
    with pytest.raises(ConfigError, match="lacks the sentinel tokens of FIM"):
        build_corpus(
            make.config(tmp_path, tokenizer={"path": str(tmp_path / "plain.json")}, fim={"rate": 0.1}), tmp_path
        )
    with pytest.raises(ConfigError, match="has no token") as error:
        build_corpus(make.config(tmp_path, tokenizer={"path": str(tmp_path / "endless.json")}), tmp_path / "out")
    assert "'<|end|>'" in error.value.hint


def test_the_commands_build_show_and_check(tmp_path, capsys):
    make.texts(tmp_path / "texts", 3)
    make.tokenizer(tmp_path / "tokenizer.json")
    make.tokenizer(tmp_path / "other.json", ["<|stop|>"])
    (tmp_path / "corpus.toml").write_text(
        f'[tokenizer]\npath = "{tmp_path}/tokenizer.json"\n\n[[sources]]\nname = "own"\n'
        f'kind = {{kind = "folder", path = "{tmp_path}/texts", files = ["*.py"]}}\n'
    )
    out = str(tmp_path / "out")
    assert cli.main(["corpus", "build", str(tmp_path / "corpus.toml"), out, "--jobs", "1"]) == Exit.DONE
    assert cli.main(["corpus", "look", out]) == Exit.DONE
    printed = capsys.readouterr().out
    assert "def function_" in printed
    assert cli.main(["corpus", "check", out, "--tokenizer", str(tmp_path / "tokenizer.json")]) == Exit.DONE
    assert cli.main(["corpus", "check", out, "--tokenizer", str(tmp_path / "other.json")]) == Exit.FAILED
    assert "is not the tokenizer of" in capsys.readouterr().err
    shard = next((tmp_path / "out").glob("*.tokens"))
    data = bytearray(shard.read_bytes())
    data[-7] ^= 1
    shard.write_bytes(data)
    assert cli.main(["corpus", "check", out]) == Exit.FAILED
    assert "is damaged: its SHA-256 is" in capsys.readouterr().err
    assert cli.main(["corpus", "look", str(tmp_path / "nothing")]) == Exit.BAD_INPUT
