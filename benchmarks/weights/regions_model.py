"""The model that `benchmarks.weights.regions` sends: one file of bf16 weights a version, mapped and never loaded.

Random normals (sigma .02), moved from version to version by normal steps of one direction (what the optimiser's rate
does, without its history): `STEP_SIZE` changes about 1.2 % of the codes each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etude.weights import Tensor

STEP_SIZE = 3e-7
ROWS_MAX = 4096


def make_model(folder: Path, num_bytes: int, num_versions: int) -> list[Path]:
    """Files of the versions, the base first."""
    cols = min(ROWS_MAX, max(8, int((num_bytes / 2 / 8) ** 0.5)))
    num_tensors = -(-num_bytes // (2 * cols * cols))
    shape = (num_tensors, cols, cols)
    paths = [folder / f"v{version}.npy" for version in range(num_versions)]
    files = [np.lib.format.open_memmap(path, "w+", np.uint16, shape) for path in paths]
    for i in range(num_tensors):
        rng = np.random.default_rng(i)
        master = rng.standard_normal((cols, cols), np.float32) * np.float32(0.02)
        move = rng.standard_normal((cols, cols), np.float32) * np.float32(STEP_SIZE)
        for file in files:
            file[i] = bf16(master)
            master += move
    for file in files:
        file.flush()
    return paths


def bf16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Codes of the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def read_model(path: Path) -> Mapping[str, Tensor]:
    """A version's tensors, as views of its mapped file."""
    file = np.load(path, mmap_mode="r")
    return {f"layers.{i:03d}.weight": Tensor("bf16", part.shape, part.reshape(-1)) for i, part in enumerate(file)}
