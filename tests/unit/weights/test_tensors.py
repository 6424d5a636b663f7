"""Tensors as raw codes: validation and digests."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from etude.weights import Spec, Tensor, content_digest, tensor_digest

CODES = np.arange(6, dtype=np.uint16)


@pytest.mark.parametrize(
    ("dtype", "shape", "codes"),
    [
        ("bf17", (6,), CODES),
        ("bf16", (5,), CODES),
        ("bf16", (2, 3), CODES.reshape(2, 3)),
        ("f32", (6,), CODES),
        ("bf16", (-6,), CODES),
        ("bf16", (1,) * 9, CODES[:1]),
    ],
)
def test_parts_that_disagree_make_no_tensor(dtype: str, shape: tuple[int, ...], codes: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=r"dtype|shape|needs"):
        Tensor(dtype, shape, codes)


def test_a_scalar_and_an_empty_tensor_are_tensors() -> None:
    assert Tensor("f32", (), np.zeros(1, np.uint32)).num_bytes == 4
    assert Tensor("f32", (0, 7), np.zeros(0, np.uint32)).num_bytes == 0


def test_codes_cannot_be_written_through_a_tensor_and_a_copy_has_its_own() -> None:
    codes = CODES.copy()
    tensor = Tensor("bf16", (6,), codes)
    kept = tensor.copy()
    codes[0] = 99
    assert (tensor.codes[0], kept.codes[0]) == (99, 0)
    with pytest.raises(ValueError, match="read-only"):
        tensor.codes[0] = 1


def test_the_digest_of_a_tensor_depends_on_dtype_shape_and_bits() -> None:
    digests = {
        tensor_digest(t)
        for t in (
            Tensor("bf16", (6,), CODES),
            Tensor("f16", (6,), CODES),
            Tensor("bf16", (2, 3), CODES),
            Tensor("bf16", (6,), CODES[::-1].copy()),
        )
    }
    assert len(digests) == 4


def test_digests_are_what_the_format_says() -> None:
    tensor = Tensor("bf16", (2, 3), CODES)
    by_hand = hashlib.sha256(b"bf16 2,3\n" + bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0])).hexdigest()
    assert tensor_digest(tensor) == by_hand
    both = hashlib.sha256(b"a\0" + bytes.fromhex(by_hand) + b"b\0" + bytes.fromhex(by_hand)).hexdigest()
    assert content_digest({"b": by_hand, "a": by_hand}) == both


def test_a_strided_view_is_taken_as_its_values() -> None:
    tensor = Tensor("bf16", (3,), CODES[::2])
    assert tensor.codes.tolist() == [0, 2, 4]
    assert tensor.spec == Spec("bf16", (3,))
