"""`Group` over torch.distributed: what `TorchLearner` asks of the ranks that share its work."""

from __future__ import annotations

import contextlib
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from etude.errors import CheckpointError, ConfigError, EtudeError
from etude.file_checksums import digests, files_in, verify_files, write_sums
from etude.models.attention import Cache, Packed
from etude.models.checkpoint import complete, prove_weights, sync
from etude.models.transformer import Transformer
from etude.numerics.adapted import Adapted
from etude.numerics.config import Quantise
from etude.numerics.operators import Operators
from etude.numerics.parallel import RankLost
from etude.seams import BlobStore
from etude.training.config import LiveWeights
from etude.training.group import SHARDS, STATE, Rowwise
from etude.training.optimizer import AdamW
from etude.training.rows import Rows
from etude.training.sharded import checkpoint
from etude.training.sharded.context import TextPart, part_of
from etude.training.sharded.lora import Across, LowRankShards
from etude.training.sharded.mesh import Mesh
from etude.training.sharded.shards import Cut, begin, cuts_of, fill, names_of, shard
from etude.training.sharded.trained import Shards
from etude.training.sharded.wholes import Wholes
from etude.training.totals import rounded, total
from etude.training.trained import Loading, Trained, recomputing
from etude.weights.shards.sharded import ShardedChannel

T = TypeVar("T")
NAMED_WITHIN_S = 5.0  # the others are waited for so long to say that they wait, too


class RankMissing(RankLost):
    """A `RankLost` that names who did not come."""


class Sharded:
    """One rank of a learner. Holds nothing of a model but how it is cut."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.rank, mesh.size
        self._cuts: Mapping[str, Cut] = {}  # of what trains
        self._wholes: Wholes | None = None

    def channel(self, store: BlobStore, **settings: Any) -> ShardedChannel:
        """The channel that these ranks publish to, each what it holds. `store`: of this rank's own."""
        return ShardedChannel(store, Exchange(self), **settings)

    def device(self, name: str) -> torch.device:
        return self.mesh.device

    def own(self, shares: int) -> range:
        share = self.rank // self.mesh.context_size
        return range(share, share + 1)

    def part(self, rows: Rows) -> Rows:
        return part_of(rows, self.mesh.context_rank, self.mesh.context_size)

    def cache(self, rows: Rows, operators: Operators) -> Cache:
        if rows.kept_N is None:
            return Packed(rows.forwarded, operators, device=self.mesh.device)
        return TextPart(rows.lengths, operators, self.mesh)

    # agreeing

    @contextlib.contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        trouble: Exception | None = None
        try:
            yield
        except RankLost:
            raise
        except Exception as error:  # noqa: BLE001  all ranks are told, and all raise it
            trouble = error
        troubled = torch.tensor([trouble is not None], dtype=torch.int32)
        with self.waited(what):
            distributed.all_reduce(troubled, distributed.ReduceOp.MAX, group=self.mesh.control)
        if troubled:
            if trouble is not None and not isinstance(trouble, EtudeError):
                trouble = EtudeError(f"rank {self.rank} failed in its {what}", repr(trouble), hint="report this")
            raise next(one for one in self.gathered(trouble) if one is not None)

    @contextlib.contextmanager
    def waited(self, what: str) -> Iterator[None]:
        try:
            yield
        except RankMissing:
            raise
        except (RuntimeError, RankLost) as error:
            if not isinstance(error, RankLost | distributed.DistError) and "gloo" not in str(error):
                raise
            raise self._lost(what, error) from None

    def _lost(self, what: str, error: Exception) -> RankMissing:
        """Who is missing: every rank that still lives says that it was left alone, within `NAMED_WITHIN_S`."""
        silent = []
        for rank in range(self.size):
            key = f"alone/{rank}"
            try:
                if rank == self.rank:
                    self.mesh.store.set(key, what)
                else:
                    self.mesh.store.wait([key], timedelta(seconds=NAMED_WITHIN_S))
            except RuntimeError:
                silent.append(rank)
        names = ", ".join(map(self.mesh.named, silent)) or "?"
        facts = f"rank {self.rank} of {self.size} waited; {_first_line(error)}"
        hint = "see its output; the ranks begin again from the last checkpoint"
        return RankMissing(f"rank {names} did not join the collective for {what}", facts, hint=hint)

    def add(self, counts: torch.Tensor) -> None:
        with self.waited("counts"):
            distributed.all_reduce(counts)

    def norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        mine = [rows for name, rows in squares.items() if self._counts(self._cuts[name])]
        return math.sqrt(rounded(self.gathered(total(torch.cat(mine)) if mine else 0)))

    def _counts(self, cut: Cut) -> bool:
        """Whether this rank speaks for what it has of a parameter."""
        return not cut.copied or (self.mesh.expert_fsdp.get_local_rank() if cut.expert else self.rank) == 0

    def gathered(self, one: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self.waited("reports"):
            distributed.all_gather_object(found, one, group=self.mesh.control)
        return found

    def at_first(self, one: T) -> list[T]:
        """The values of all ranks, in order of rank, on rank 0; empty on the others."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.waited("weights"):
            distributed.gather_object(one, found, dst=0, group=self.mesh.control)
        return found or []

    # weights in and out

    def load(self, loading: Loading) -> Trained:
        mesh, config, operators = self.mesh, loading.config, loading.operators
        with self.agreed("checkpoint"):
            loading.check_kind()
            if loading.quantise is not Quantise.NONE:
                raise ConfigError(
                    f"numerics.quantise = {str(loading.quantise)!r} with learner.ranks = {self.size}",
                    "a format packs matrices that no rank has whole",
                    hint="train in one process, or without a format",
                )
            base = loading.base
            operators = Adapted(operators) if config.lora_rank else operators
            model = recomputing(begin(base, operators, mesh), config.recompute)
            prove_weights(base, part=self.rank, parts=self.size)
        cuts = cuts_of(model, mesh)
        parts = (model, self, cuts, names_of(model, cuts, mesh), config.weights, base)
        trained = LowRankShards(*parts, loading) if config.lora_rank else Shards(*parts)
        self._cuts = trained.copies or cuts
        self._wholes = Wholes(cuts, mesh)
        lossless = operators.dtype is torch.bfloat16 and config.weights is LiveWeights.BF16
        with self.waited("shards"):
            gathered = torch.bfloat16 if lossless and not operators.exact else None
            shard(model, mesh, exact=operators.exact, gathered=gathered)
        with self.agreed("weights"):
            fill(model, base, cuts, trained.named, mesh)
            trained.filled()
        return trained

    def summed(self, optimizer: AdamW, shares: int) -> Rowwise | None:
        copied = any(cut.copied for cut in self._cuts.values())
        return Across(optimizer, self._cuts, self.mesh) if copied else None

    def restore(self, path: Path, optimizer: AdamW) -> None:
        with self.agreed("optimiser"):
            state = [name for name in files_in(path) if name == STATE or name.startswith(f"{SHARDS}/")]
            verify_files(path, state[self.rank :: self.size], kind=CheckpointError)
        with self.agreed("optimiser"):
            if (path / SHARDS).is_dir():
                checkpoint.restore(path / SHARDS, optimizer, self._cuts, self.mesh.control)
            else:
                checkpoint.restore_of_one(path / STATE, optimizer, self._cuts)

    @contextlib.contextmanager
    def directory(self, path: Path) -> Iterator[Path]:
        hidden = path.parent / f".{path.name}.{self.gathered(secrets.token_hex(4))[0]}"
        try:
            with self.agreed("directory"):
                if self.rank == 0:
                    hidden.mkdir(parents=True)
            yield hidden  # what it raises it raises on all ranks
            with self.agreed("directory"):
                sync(hidden)
            with self.agreed("directory"):
                mine = digests(hidden, files_in(hidden)[self.rank :: self.size])
            parts = self.gathered(mine)
            with self.agreed("directory"):
                if self.rank == 0:
                    write_sums(hidden, {name: one for part in parts for name, one in part.items()})
                    sync(hidden)
            with self.agreed("directory"):
                if self.rank == 0:
                    complete(hidden, path)
        except EtudeError as error:
            if isinstance(error, RankLost | CheckpointError):
                raise
            hint = "free disk space or choose another place"
            raise CheckpointError(f"the checkpoint {path} could not be written", str(error), hint=hint) from None
        finally:
            if self.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)

    def keep(self, folder: Path, optimizer: AdamW) -> None:
        with self.waited("optimiser"):
            checkpoint.save(folder / SHARDS, optimizer, self._cuts, self.mesh.control)

    def together(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self._wholes is not None, "load comes first"
        with self.waited("matrices"):
            return self._wholes.together(rows)

    def apart(self, wholes: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self._wholes is not None, "load comes first"
        with self.waited("matrices"):
            return self._wholes.apart(wholes, like)

    def reset(self, model: Transformer) -> None:
        model.reset_iter_state()  # type: ignore[operator]  # FSDP2's


class Exchange:
    """How the ranks publish: in a thread of their own, so in a group of their own."""

    def __init__(self, group: Sharded) -> None:
        self._group, self._mesh, self.rank = group, group.mesh, group.rank

    def gather(self, data: bytes) -> Sequence[bytes]:
        found: list[Any] | None = [None] * self._mesh.size if self.rank == 0 else None
        with self._group.waited("descriptions of what they publish"):
            distributed.gather_object(data, found, dst=0, group=self._mesh.publishing)
        return found or []

    def broadcast(self, data: bytes) -> bytes:
        one = [data]
        with self._group.waited("orders to publish"):
            distributed.broadcast_object_list(one, src=0, group=self._mesh.publishing)
        return one[0]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
