"""`ProcessGroup` over torch.distributed: the ranks of a sharded learner."""

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

from etude.errors import CheckpointError, EtudeError
from etude.file_checksums import digests, files_in, verify_files, write_sums
from etude.models.attention import Cache
from etude.models.checkpoint import verify_weights
from etude.models.checkpoint_files import fsync_directory, rename_into_place
from etude.models.transformer import Transformer
from etude.numerics.lora import LoraOperators
from etude.numerics.operators import Operators
from etude.numerics.parallel import RankLost
from etude.seams import BlobStore
from etude.training.config import LiveWeights
from etude.training.exact_sum import exact_norm, exact_sum, rounded_sum
from etude.training.muon import ShardExchange
from etude.training.optimizer import AdamW
from etude.training.process_group import OPTIMIZER_FILE, OPTIMIZER_SHARDS, SINGLE_PROCESS, ShareAccumulator
from etude.training.sharded import checkpoint
from etude.training.sharded.context_parallel import ContextParallelCache, rank_part
from etude.training.sharded.fsdp import ShardSpec, apply_fsdp, load_shards, meta_model, shard_specs, tensor_slices
from etude.training.sharded.full_tensors import FullTensors
from etude.training.sharded.lora import RankAccumulator, ShardedLora
from etude.training.sharded.mesh import Mesh
from etude.training.sharded.replicated import ReplicatedTensors, ReplicatedWeights
from etude.training.sharded.trainable import ShardedWeights
from etude.training.token_batch import TokenBatch, Tokens
from etude.training.trainable import LoadRequest, Trainable, load_trainable, set_recompute
from etude.weights.shards.sharded import ShardedChannel

T = TypeVar("T")
REPORT_WITHIN_S = 5.0  # other live ranks must report within this time that they are waiting, too


class RankMissing(RankLost):
    """A `RankLost` that names the ranks that did not join."""


class ShardedProcessGroup:
    """One rank of a sharded learner: the `ProcessGroup` over the ranks of a `Mesh`.

    It has the layout of the shards, not the model itself."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank, self.size = mesh, mesh.rank, mesh.size
        self._specs: Mapping[str, ShardSpec] = {}  # of what trains
        self._exchange: ShardExchange | None = None
        self._replicated = False

    def channel(self, store: BlobStore, **settings: Any) -> ShardedChannel:
        """Return the channel to which these ranks publish, each its own tensors.

        `store`: this rank's own connection. `settings`: those of `ShardedChannel`."""
        return ShardedChannel(store, PublishExchange(self), **settings)

    def device(self, name: str) -> torch.device:
        return self.mesh.device

    def own_shares(self, shares: int) -> range:
        share = self.rank // self.mesh.context_size
        return range(share, share + 1)

    def local_tokens(self, rows: Tokens) -> Tokens:
        return rank_part(rows, self.mesh.context_rank, self.mesh.context_size)

    def cache(self, rows: TokenBatch, operators: Operators) -> Cache:
        if rows.kept_N is None:
            return rows.cache(operators)
        return ContextParallelCache(rows.lengths, operators, self.mesh)

    # agreeing

    @contextlib.contextmanager
    def propagate_errors(self, what: str) -> Iterator[None]:
        own_error: Exception | None = None
        try:
            yield
        except RankLost:
            raise
        except Exception as error:  # noqa: BLE001  sent to all ranks, and raised on all
            own_error = error
        any_error = torch.tensor([own_error is not None], dtype=torch.int32)
        with self.collective(what):
            distributed.all_reduce(any_error, distributed.ReduceOp.MAX, group=self.mesh.control)
        if any_error:
            if own_error is not None and not isinstance(own_error, EtudeError):
                own_error = EtudeError(
                    f"rank {self.rank} failed: {what}", repr(own_error), hint="this is a defect of etude: report it"
                )
            raise next(error for error in self.all_gather(own_error) if error is not None)

    @contextlib.contextmanager
    def collective(self, what: str) -> Iterator[None]:
        try:
            yield
        except RankMissing:
            raise
        except (RuntimeError, RankLost) as error:
            if not isinstance(error, RankLost | distributed.DistError) and "gloo" not in str(error):
                raise
            raise self._lost(what, error) from None

    def _lost(self, what: str, error: Exception) -> RankMissing:
        """Name the missing ranks: every live rank reports within `REPORT_WITHIN_S` that it is waiting."""
        silent = []
        for rank in range(self.size):
            key = f"alone/{rank}"
            try:
                if rank == self.rank:
                    self.mesh.store.set(key, what)
                else:
                    self.mesh.store.wait([key], timedelta(seconds=REPORT_WITHIN_S))
            except RuntimeError:
                silent.append(rank)
        names = ", ".join(map(self.mesh.describe_rank, silent)) or "?"
        facts = f"rank {self.rank} of {self.size} waited; {_first_line(error)}"
        hint = "see the output of that rank; the ranks restart from the last checkpoint"
        return RankMissing(f"rank {names} did not join the collective for {what}", facts, hint=hint)

    def all_reduce(self, counts: torch.Tensor) -> None:
        with self.collective("counts"):
            distributed.all_reduce(counts)

    def global_norm(self, squares: Mapping[str, torch.Tensor]) -> float:
        if self._replicated:
            return exact_norm(squares)
        mine = [rows for name, rows in squares.items() if self._counts(self._specs[name])]
        return math.sqrt(rounded_sum(self.all_gather(exact_sum(torch.cat(mine)) if mine else 0)))

    def _counts(self, spec: ShardSpec) -> bool:
        """Return whether this rank counts its rows of a parameter, which other ranks may have, too."""
        return not spec.copied or (self.mesh.expert_fsdp.get_local_rank() if spec.expert else self.rank) == 0

    def all_gather(self, one: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self.collective("reports"):
            distributed.all_gather_object(found, one, group=self.mesh.control)
        return found

    def gather_to_first(self, one: T) -> list[T]:
        """Return the values of all ranks, in order of rank, on rank 0; an empty list on the others."""
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.collective("weights"):
            distributed.gather_object(one, found, dst=0, group=self.mesh.control)
        return found or []

    # weights in and out

    def load(self, request: LoadRequest) -> Trainable:
        self._replicated = request.replicated
        if request.replicated:
            with self.propagate_errors("checkpoint"):
                whole = ReplicatedWeights(load_trainable(request), self)
            self._specs, self._exchange = whole.specs, ReplicatedTensors(self.mesh)
            return whole
        mesh, config, operators = self.mesh, request.config, request.operators
        with self.propagate_errors("checkpoint"):
            request.check_kind()
            base = request.base
            operators = LoraOperators(operators) if config.lora_rank else operators
            model = set_recompute(meta_model(base, operators, mesh), config.recompute)
            if config.lora_rank:
                model.cast(request.frozen_dtype)
            elif request.weight_dtype is not torch.float32:
                model.cast(request.weight_dtype)
            verify_weights(base, part=self.rank, parts=self.size)
        specs = shard_specs(model, mesh)
        parts = (model, self, specs, tensor_slices(model, specs, mesh), config.weights, base)
        trainable = ShardedLora(*parts, request) if config.lora_rank else ShardedWeights(*parts, request.quantise)
        self._specs = trainable.copies or specs
        self._exchange = FullTensors(specs, mesh)
        lossless = operators.dtype is torch.bfloat16 and config.weights is LiveWeights.BF16
        with self.collective("shards"):
            gathered = torch.bfloat16 if lossless and not operators.exact else None
            apply_fsdp(model, mesh, exact=operators.exact, gathered=gathered)
        with self.propagate_errors("weights"):
            load_shards(model, base, specs, trainable.named, mesh)
            trainable.filled()
        return trainable

    def accumulator(self, optimizer: AdamW, shares: int) -> ShareAccumulator | None:
        if any(spec.copied for spec in self._specs.values()):
            return RankAccumulator(optimizer, self._specs, self.mesh)
        return None

    def first_row(self, name: str) -> int:
        return self._specs[name].start if name in self._specs else 0  # others are in full on every rank

    def restore_optimizer(self, path: Path, optimizer: AdamW) -> None:
        with self.propagate_errors("optimiser"):
            state = [
                name for name in files_in(path) if name == OPTIMIZER_FILE or name.startswith(f"{OPTIMIZER_SHARDS}/")
            ]
            verify_files(path, state[self.rank :: self.size], kind=CheckpointError)
        with self.propagate_errors("optimiser"):
            if (path / OPTIMIZER_SHARDS).is_dir():
                checkpoint.restore(path / OPTIMIZER_SHARDS, optimizer, self._specs, self.mesh.control)
            else:
                checkpoint.restore_from_single(path / OPTIMIZER_FILE, optimizer, self._specs)

    @contextlib.contextmanager
    def checkpoint_directory(self, path: Path) -> Iterator[Path]:
        hidden = path.parent / f".{path.name}.{self.all_gather(secrets.token_hex(4))[0]}"
        try:
            with self.propagate_errors("directory"):
                if self.rank == 0:
                    hidden.mkdir(parents=True)
            yield hidden  # errors of the block are raised on all ranks
            with self.propagate_errors("directory"):
                fsync_directory(hidden)
            with self.propagate_errors("directory"):
                mine = digests(hidden, files_in(hidden)[self.rank :: self.size])
            parts = self.all_gather(mine)
            with self.propagate_errors("directory"):
                if self.rank == 0:
                    write_sums(hidden, {name: one for part in parts for name, one in part.items()})
                    fsync_directory(hidden)
            with self.propagate_errors("directory"):
                if self.rank == 0:
                    rename_into_place(hidden, path)
        except EtudeError as error:
            if isinstance(error, RankLost | CheckpointError):
                raise
            hint = "free disk space or choose another place"
            raise CheckpointError(f"the checkpoint {path} could not be written", str(error), hint=hint) from None
        finally:
            if self.rank == 0:
                shutil.rmtree(hidden, ignore_errors=True)

    def save_optimizer(self, folder: Path, optimizer: AdamW) -> None:
        if self._replicated:
            with self.propagate_errors("optimiser"):
                if self.rank == 0:
                    SINGLE_PROCESS.save_optimizer(folder, optimizer)
            return
        with self.collective("optimiser"):
            checkpoint.save(folder / OPTIMIZER_SHARDS, optimizer, self._specs, self.mesh.control)

    def gather(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert self._exchange is not None, "load comes first"
        with self.collective("matrices"):
            return self._exchange.gather(rows)

    def shard(
        self, full_tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        assert self._exchange is not None, "load comes first"
        with self.collective("matrices"):
            return self._exchange.shard(full_tensors, like)

    def reset(self, model: Transformer) -> None:
        if not self._replicated:
            model.reset_iter_state()  # type: ignore[operator]  # FSDP2's


class PublishExchange:
    """The communication of the ranks while they publish. It has its own process group, since it runs in its own
    thread."""

    def __init__(self, group: ShardedProcessGroup) -> None:
        self._group, self._mesh, self.rank = group, group.mesh, group.rank

    def gather(self, data: bytes) -> Sequence[bytes]:
        found: list[Any] | None = [None] * self._mesh.size if self.rank == 0 else None
        with self._group.collective("descriptions of what they publish"):
            distributed.gather_object(data, found, dst=0, group=self._mesh.publishing)
        return found or []

    def broadcast(self, data: bytes) -> bytes:
        one = [data]
        with self._group.collective("orders to publish"):
            distributed.broadcast_object_list(one, src=0, group=self._mesh.publishing)
        return one[0]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
