"""Evaluates two versions of a run on the suites of a release's gate, and compares them.

The evaluations are the command `etude eval` in a child process, which never outlives this one. Results are stored, and
used again for the same weights and the same suite, so a promoted version is not evaluated a second time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.config import to_plain
from etude.environments.child_process import die_with_parent
from etude.errors import DeadlineExceeded, EtudeError
from etude.evals.records import record_path
from etude.evals.suites import Suite, read_suite
from etude.loop.checkpoints import checkpoint_of
from etude.prices import read_prices
from etude.records import Version
from etude.releases import GateResult, Release, check_gate
from etude.releases.gate import Played, read_parity, read_played
from etude.run import RunFolder

EVAL_S = 6 * 3600.0
"""The longest time of one evaluation, in seconds."""
TRIES = 3
"""Starts of an evaluation that is killed."""
_GRACE_S = 10.0
_UNFINISHED = ".unfinished"


class Gate:
    """Decides whether a release of a run may begin its canary.

    `folder`: where evaluation results are stored. `prices`: a TOML file with a table of prices, or None. `tell` is
    called with a line for each evaluation."""

    def __init__(self, run: RunFolder, folder: Path, prices: Path | None, tell: Callable[[str], None]) -> None:
        self._run, self._folder, self._prices, self._tell = run, folder, prices, tell

    async def check(self, release: Release) -> GateResult:
        """Evaluate the candidate and the stable version of a release, and compare them.

        A version that has a stored result for a suite, at these prices, is not evaluated again on it.

        Raises `EtudeError` if an evaluation fails, and `InputError` if the results cannot be compared."""
        played = dict[str, tuple[Played, Played]]()
        for one in release.settings.gate:
            suite = read_suite(one.suite)
            both = [await self._played(one.suite, suite, v) for v in (release.candidate, release.stable)]
            played[one.suite] = both[0], both[1]
        parity = await self._parity(release.candidate) if release.settings.parity else None
        return check_gate(release.settings, release.candidate, release.stable, played, parity=parity)

    async def _played(self, name: str, suite: Suite, version: Version) -> Played:
        prices = None if self._prices is None else read_prices(self._prices)  # costs are compared at the same prices
        plain = json.dumps([to_plain(suite), to_plain(prices)], sort_keys=True, default=str)
        label = f"step-{version.step:06d}-{version.digest[:12]}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
        path = record_path(self._folder, suite.name, label)
        if not path.is_file():
            self._tell(f"evaluating {version} on {suite.name}")
            scratch = self._folder / _UNFINISHED
            words = ["eval", name, "--checkpoint", str(checkpoint_of(self._run, version)), "--name", label]
            words += ["--out", str(scratch), *(["--prices", str(self._prices)] if self._prices else [])]
            found = record_path(scratch, suite.name, label)
            for _ in range(TRIES):
                shutil.rmtree(scratch, ignore_errors=True)
                result = await _command(words)
                if result.code >= 0:
                    break  # it was not killed
            if result.code < 0 or not found.is_file():  # a suite whose own gates fail ends with an error, and a result
                raise _failed(f"{version} could not be evaluated on {suite.name}", result)
            path.parent.mkdir(parents=True, exist_ok=True)
            found.with_suffix(".parquet").replace(path.with_suffix(".parquet"))
            found.replace(path)
        return read_played(self._folder, suite.name, label)

    async def _parity(self, version: Version) -> str:
        self._tell(f"comparing engine and learner on {version}")
        result = await _command(["parity", str(checkpoint_of(self._run, version)), "--json"])
        path = self._folder / "parity.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(result.out)
        if not result.out.strip():
            raise _failed(f"engine and learner could not be compared on {version}", result)
        return read_parity(path)


class _Result:
    """What a command printed, and its exit code."""

    def __init__(self, words: Sequence[str], code: int, out: bytes, err: bytes) -> None:
        self.words, self.code, self.out, self.err = words, code, out, err


async def _command(words: Sequence[str]) -> _Result:
    """Run a command of etude in a process of its own, which is killed with this one or when the caller is cancelled.

    Raises `DeadlineExceeded` after `EVAL_S`."""
    process = await asyncio.create_subprocess_exec(
        *die_with_parent([sys.executable, "-m", "etude.cli", *words]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(EVAL_S):
            out, err = await process.communicate()
    except TimeoutError:
        what, facts = f"etude {words[0]} did not end", f"it ran for {EVAL_S:g} s: etude {' '.join(words)}"
        raise DeadlineExceeded(what, facts, hint="use fewer tasks in the suite") from None
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _Result(words, process.returncode or 0, out, err)


def _failed(what: str, result: _Result) -> EtudeError:
    tail = result.err.decode(errors="replace").strip()[-1000:]
    hint = f"try it: etude {' '.join(result.words)}"
    return EtudeError(what, f"exit code {result.code}: {tail}", hint=hint)
