"""Objects made on the device are the CPU's, byte for byte, and they update live memory there in place."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")

from etude.errors import WeightsError
from etude.weights import Tensor, gpu
from etude.weights.delta import codec
from etude.weights.delta.tiles import NumpyKernels
from etude.weights.tensors import DTYPES, Spec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {
    "embed": Spec("bf16", (30, 50)),
    "same": Spec("f32", (7,)),
    "packed": Spec("f4_e2m1x2", (3, 11)),
    "norm": Spec("bf16", (50,)),
    "noise": Spec("f8_e4m3", (40, 16)),
    "steps": Spec("i64", (3,)),
    "fresh": Spec("f16", (4, 5)),
    "scalar": Spec("f32", ()),
    "empty": Spec("bf16", (0, 4)),
}
KERNELS = gpu.DeviceKernels(block=512)


def versions() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A few small steps, a tensor that is another one altogether, one that is new."""
    rng = np.random.default_rng(5)
    old, new = {}, {}
    for name, spec in SPECS.items():
        codes = rng.integers(0, 1 << min(62, DTYPES[spec.dtype].bits), spec.size).astype(DTYPES[spec.dtype].codes)
        step = (rng.random(spec.size) < 0.1).astype(codes.dtype)
        moved = codes if name == "same" else rng.permutation(codes) if name == "noise" else codes + step
        new[name] = Tensor(spec.dtype, spec.shape, moved)
        if name != "fresh":
            old[name] = Tensor(spec.dtype, spec.shape, codes)
    return old, new


def on_device(tensors: dict[str, Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(t.codes.view(f"i{t.codes.itemsize}").copy()).reshape(t.shape).to(DEVICE)
        for name, t in tensors.items()
    }


def on_host(live: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: t.cpu().numpy().view(f"u{t.element_size()}").reshape(-1).tolist() for name, t in live.items()}


def codes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: t.codes.tolist() for name, t in tensors.items()}


@pytest.mark.parametrize("mode", ["best", "fast"])
def test_an_object_of_two_snapshots_on_the_device_is_that_of_the_cpu(mode: codec.Mode) -> None:
    old, new = versions()
    expected = codec.encode([*new.values()], [old.get(name) for name in new], mode, kernels=NumpyKernels())
    assert gpu.encode(on_device(new), on_device(old), SPECS, mode, KERNELS) == expected


def test_an_update_is_prepared_then_written_in_place_then_undone() -> None:
    old, new = versions()
    data = codec.encode([*new.values()], [old.get(name) for name in new])
    room = Tensor("f16", (4, 5), np.zeros(20, np.uint16))
    live = on_device({**old, "fresh": room})
    before, addresses = on_host(live), {name: tensor.data_ptr() for name, tensor in live.items()}
    update = gpu.prepare(data, SPECS, live, kernels=KERNELS)
    assert on_host(live) == before
    assert update.num_bytes > 0
    update.write()
    assert on_host(live) == codes(new)
    update.undo()
    assert on_host(live) == before
    gpu.apply(data, SPECS, live, kernels=KERNELS)
    assert on_host(live) == codes(new)
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses


def test_an_update_prepared_without_undo_refuses_to_undo() -> None:
    old, new = versions()
    del new["fresh"]
    specs = {name: SPECS[name] for name in new}
    data = codec.encode([*new.values()], [old[name] for name in new])
    update = gpu.prepare(data, specs, on_device(old), undoable=False, kernels=KERNELS)
    update.write()
    with pytest.raises(WeightsError, match="undone"):
        update.undo()


def test_a_damaged_object_is_refused_before_anything_is_written() -> None:
    old, new = versions()
    data = codec.encode([*new.values()], [old.get(name) for name in new])
    live = on_device({**old, "fresh": Tensor("f16", (4, 5), np.zeros(20, np.uint16))})
    before = on_host(live)
    for bad in (data[:-1], data + b"\0", bytes(4) + data[4:]):
        with pytest.raises(WeightsError, match="damaged"):
            gpu.prepare(bad, SPECS, live, kernels=KERNELS)
    del live["fresh"]
    with pytest.raises(WeightsError, match="no live memory"):
        gpu.prepare(data, SPECS, live, kernels=KERNELS)
    assert on_host(live).items() <= before.items()


def test_memory_that_is_not_what_its_spec_says_is_refused_by_name() -> None:
    specs = {"w": Spec("bf16", (4, 4))}
    for tensor in (torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 4, dtype=torch.int16).t()[:, ::1].T[:, :2]):
        with pytest.raises(WeightsError, match="'w' is"):
            gpu.encode({"w": tensor}, {}, specs)


def test_the_guides_code_runs_as_it_stands_there() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "weights-on-a-gpu.md"
    (code,) = re.findall(r"```python\n(.*?)```", guide.read_text(), re.S)
    exec(code, {})


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU here: a hundred million items take the interpreter hours")
def test_a_large_snapshot_on_a_gpu_goes_there_and_back() -> None:
    specs = {"w": Spec("bf16", (10_000, 10_001)), "v": Spec("f8_e4m3", (9_999, 1_025))}
    made = torch.Generator("cuda").manual_seed(0)
    old = {
        "w": torch.randn(10_000, 10_001, device="cuda", generator=made).mul_(0.02).bfloat16().view(torch.int16),
        "v": torch.randint(0, 256, (9_999, 1_025), device="cuda", generator=made).to(torch.uint8),
    }
    for share in (0.01, 0.5):
        step = {n: (torch.rand(t.shape, device="cuda", generator=made) < share).to(t.dtype) for n, t in old.items()}
        new = {name: tensor + step[name] for name, tensor in old.items()}
        data = gpu.encode(new, old, specs)
        host = [
            [
                Tensor(s.dtype, s.shape, t[n].cpu().view(-1).numpy().view(DTYPES[s.dtype].codes))
                for n, s in specs.items()
            ]
            for t in (new, old)
        ]
        assert data == codec.encode(*host)
        live = {name: tensor.clone() for name, tensor in old.items()}
        update = gpu.prepare(data, specs, live)
        update.write()
        assert all(torch.equal(live[name], new[name]) for name in specs)
        update.undo()
        assert all(torch.equal(live[name], old[name]) for name in specs)
        gpu.apply(data, specs, live)
        assert all(torch.equal(live[name], new[name]) for name in specs)
