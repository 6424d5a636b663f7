"""The parts of an engine's ranks that need no second process: their parts of new weights, messages, refusals."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.same_bits import sharp
from tests.parity.test_exact import DEEPSEEK, GLM, QWEN

from etude.errors import ConfigError, WeightsError
from etude.inference.config import EngineConfig, Speculation, check_ranks
from etude.inference.rank_messages import Call, Link, Score, Step
from etude.inference.ranks import part_target
from etude.inference.weight_sync import initial_version
from etude.models import ModelConfig, hf_views, load_model, save_model
from etude.models.checkpoint import rounded_weights
from etude.models.tensor_parallel import shard_model, shard_tensor
from etude.numerics.config import Mode, NumericsConfig, Quantise
from etude.numerics.exact.operators import Exact
from etude.numerics.parallel import Parallel
from etude.weights import Tensor

from .helpers import update

LATENTS = replace(DEEPSEEK, num_heads=4, num_kv_heads=4)
assert LATENTS.latent is not None
WHOLE_QUERIES = replace(LATENTS, latent=replace(LATENTS.latent, q_rank=None))


@pytest.mark.parametrize("config", [LATENTS, WHOLE_QUERIES, QWEN, GLM])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_gets_its_part_of_a_version_and_of_changes_and_back_again(config: ModelConfig, rank: int) -> None:
    parallel = Parallel(2, rank)
    model = shard_model(sharp(config, Exact(degree=2)), parallel)
    live, coming = hf_views(model), hf_views(sharp(config, Exact(degree=2), seed=2))
    codes = {name: view.numpy().view(np.uint32).ravel().copy() for name, view in coming.items()}
    tensors = {name: Tensor("f32", tuple(coming[name].shape), codes[name]) for name in coming}

    def wrong(wanted: dict[str, torch.Tensor]) -> list[str]:
        return [n for n, view in live.items() if not torch.equal(view, shard_tensor(n, wanted[n], parallel))]

    assert wrong(coming)
    target = part_target(model, tensors)
    target.prepare(update(1, tensors), tensors, undoable=False).apply()
    assert wrong(coming) == []
    assert target.differing(tensors) == []
    rng, changed, after = np.random.default_rng(0), {}, {}
    for name, old in codes.items():
        places = np.flatnonzero(rng.random(old.size) < 0.1).astype(np.int64)
        new = old.copy()
        new[places] ^= np.uint32(1 << 16)
        changed[name] = places, new[places]
        after[name] = Tensor("f32", tensors[name].shape, new)
    swap = target.prepare(update(2, after, changed=changed), after)
    swap.apply()
    assert (
        wrong({n: torch.from_numpy(t.codes.view(np.float32).reshape(t.shape).copy()) for n, t in after.items()}) == []
    )
    swap.undo()
    assert wrong(coming) == []


def test_a_tensor_that_ranks_cannot_divide_as_the_model_is_divided_is_refused() -> None:
    model = shard_model(sharp(QWEN, Exact(degree=2)), Parallel(2))
    tensors = {
        name: Tensor("f32", tuple(view.shape), np.zeros(view.numel(), np.uint32))
        for name, view in hf_views(sharp(replace(QWEN, hidden_size=64), Exact(degree=2))).items()
    }
    with pytest.raises(WeightsError, match="on rank 0"):
        part_target(model, tensors)


def test_the_version_of_a_checkpoint_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    model = sharp(LATENTS, Exact())
    for name, buffer in model.named_buffers():
        if name.endswith("experts.bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, buffer.numel()))
    save_model(model, tmp_path / "model", dtype="f32")
    one = load_model(tmp_path / "model", weight_dtype=torch.bfloat16)
    version = initial_version(hf_views(one).items())
    assert initial_version(rounded_weights(tmp_path / "model", torch.bfloat16)) == version
    assert initial_version(rounded_weights(tmp_path / "model", torch.float32)) != version


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_long_messages_and_file_descriptors_arrive(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    ours, theirs = (Link(end, 60.0) for end in ends)
    step = Step([(1, 2, 3)], [0], [7], [(1, 0, 2)], [5, 6, 7])
    text = Score(list(range(200_000)))
    (tmp_path / "file").write_text("weights")
    with (tmp_path / "file").open("rb") as file:
        sender = threading.Thread(target=lambda: (ours.send(step, file.fileno()), ours.send(text)))
        sender.start()
        (got, [fd]), (long, none) = theirs.receive(Call), theirs.receive(Call)
        sender.join(60)
    assert (got, long, none) == (step, text, [])
    assert os.read(fd, 10) == b"weights"
    os.close(fd)


@pytest.mark.parametrize("data", [b"", b"\1\0", (9).to_bytes(8, "little") + b"five", (1 << 60).to_bytes(8, "little")])
def test_an_end_in_the_middle_or_a_length_that_no_message_has_is_the_end_of_the_other_rank(
    ends: tuple[socket.socket, socket.socket], data: bytes
) -> None:
    ends[0].sendall(data)
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        Link(ends[1], 60.0).receive(Call)


def test_a_rank_that_says_nothing_is_late(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        Link(ends[1], 0.05).receive(Call)


@pytest.mark.parametrize(
    ("engine", "numerics", "hint"),
    [
        ({}, {}, "set numerics.degree = 2"),
        ({"tensor_parallel": 4}, {"degree": 2}, "set numerics.degree = 4"),
        ({"device": "cuda"}, {"degree": 2}, "set engine.device = 'cpu'"),
        ({}, {"degree": 2, "quantise": Quantise.MXFP8}, "quantise = 'none'"),
        ({"speculation": Speculation.HEADS}, {"degree": 2}, "speculation = 'look-up'"),
    ],
)
def test_what_ranks_cannot_do_is_refused_with_what_to_set(
    engine: dict[str, Any], numerics: dict[str, Any], hint: str
) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel = . is not possible") as told:
        check_ranks(EngineConfig(**{"tensor_parallel": 2, **engine}), NumericsConfig(**numerics))
    assert hint in told.value.hint
    check_ranks(EngineConfig(), NumericsConfig(quantise=Quantise.MXFP8))
    check_ranks(EngineConfig(tensor_parallel=2), NumericsConfig(degree=4))
    check_ranks(EngineConfig(tensor_parallel=2, device="cuda"), NumericsConfig(mode=Mode.NATIVE))
    with pytest.raises(ValueError, match="tensor_parallel = 3 is not a power of two"):
        EngineConfig(tensor_parallel=3)
