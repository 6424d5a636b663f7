"""Paths, content types and control messages that an engine's server and its client share. No torch."""

from __future__ import annotations

import msgspec

from etude.records.completion import Version

JSON = "application/json"
MSGPACK = "application/msgpack"
GENERATE = "/inference/v1/generate"


class AdoptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /adopt."""

    min_step: int
    deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0.0 < self.deadline_s < 1e6:
            raise ValueError(f"deadline_s is {self.deadline_s}")


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /verify."""

    token_ids: list[int]


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /verify: the version in live memory and its log-probability of each token but the first."""

    version: Version
    logprobs: list[float]


class OperatorsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /operators: a text of which the first `prompt_tokens` are computed in chunks, the others singly."""

    token_ids: list[int]
    prompt_tokens: int


class OperatorResult(msgspec.Struct, frozen=True, kw_only=True):
    """One operator's results for every token; raw little-endian bytes, since numpy has no bfloat16."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class OperatorResults(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /operators, in the order of computing."""

    results: list[OperatorResult]
