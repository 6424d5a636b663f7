"""Which routes are replayed, and the errors for routes that cannot be."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from etude.errors import ParityError
from etude.models import ModelConfig
from etude.records import Sample
from etude.records.rollout import Path
from etude.training.routes import RouteReplay

SIZES = ModelConfig(num_layers=2, num_experts=6, top_k=2)
WIDE = ModelConfig(num_layers=2, num_experts=300, top_k=2)


def sample(steps: list[int], of: ModelConfig = SIZES) -> Sample:
    """A path of which each token was sampled or read by the version of `steps`."""
    num, dtype = len(steps), np.dtype(of.route_dtype)
    routes = np.zeros((num, of.num_moe_layers, of.top_k), dtype) + np.arange(of.top_k, dtype=dtype)
    routes[-1] = np.iinfo(dtype).max
    path = Path(
        token_ids=np.zeros(num, np.int32),
        mask=np.arange(num) > 1,
        logprobs=np.zeros(num, np.float32),
        steps=np.array(steps, np.int32),
        kv_epochs=np.zeros(num, np.int32),
        routes=routes,
    )
    return Sample.uniform("g000003.1", path, 1.0)


def with_routes(one: Sample, routes: np.ndarray) -> Sample:
    return msgspec.structs.replace(one, path=msgspec.structs.replace(one.path, routes=routes))


def test_a_position_belongs_to_the_version_that_computed_it_and_only_new_ones_are_replayed() -> None:
    one = sample([3, 3, 3, 4, 4, 5, 5])
    known = [(RouteReplay(SIZES, step=5, max_lag=lag).routes([one], [6])[:, 0, 0] != 255).tolist() for lag in (0, 1, 2)]
    # position p predicts token p + 1, and the version that did so computed it
    assert known == [[False] * 4 + [True] * 2, [False] * 2 + [True] * 4, [True] * 6]


def test_a_position_of_no_known_version_is_replayed() -> None:
    assert (RouteReplay(SIZES, step=9, max_lag=0).routes([sample([-1, -1, 9, 9])], [3]) != 255).all()


def test_what_a_version_of_a_lost_lineage_computed_is_as_stale_as_its_apparent_step_says() -> None:
    one = sample([-3, -3, -2, -2, 1])
    known = [(RouteReplay(SIZES, step=1, max_lag=lag).routes([one], [4])[:, 0, 0] != 255).tolist() for lag in (1, 3, 4)]
    assert known == [[False] * 3 + [True], [False] + [True] * 3, [True] * 4]


@pytest.mark.parametrize(("of", "missing"), [(SIZES, 255), (WIDE, 65535)])
def test_each_dtype_has_its_own_sentinel(of: ModelConfig, missing: int) -> None:
    routes = RouteReplay(of, step=9, max_lag=0).routes([sample([9, 8, 8, 9], of)], [3])
    assert str(routes.dtype) == f"torch.{of.route_dtype}"
    assert routes[:, 0, 0].long().tolist() == [missing, missing, 0]


def test_a_stale_position_is_not_looked_at_and_needs_no_route() -> None:
    one = sample([3, 3, 3, 9, 9])
    routes = one.path.routes.copy()
    routes[:2] = 255
    RouteReplay(SIZES, step=9, max_lag=1).routes([with_routes(one, routes)], [4])
    bare = with_routes(sample([3] * 5), np.zeros((0, 0, 0), np.uint8))
    assert (RouteReplay(SIZES, step=9, max_lag=1).routes([bare], [4]) == 255).all()


def broken(what: str) -> np.ndarray:
    routes = sample([9] * 5).path.routes.copy()
    match what:
        case "missing":
            routes[2, 1] = 255
        case "beyond":
            routes[2, 1, 0] = 6
        case "twice":
            routes[2, 1] = 4
        case "layers":
            routes = routes[:, :1]
        case "choices":
            routes = routes[..., :1]
        case "wide":
            routes = routes.astype(np.uint16)
        case "short":
            routes = routes[:2]
        case "none":
            routes = np.zeros((0, 0, 0), np.uint8)
    return routes


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("missing", "lacks the chosen experts at position 2"),
        ("beyond", "names an expert that does not exist at position 2"),
        ("twice", "names an expert twice at position 2"),
        ("layers", "routes of another model"),
        ("choices", "routes of another model"),
        ("wide", "routes of another model"),
        ("short", "lacks the chosen experts at position 2"),
        ("none", "lacks the chosen experts at position 0"),
    ],
)
def test_a_route_that_cannot_be_replayed_is_named_with_its_rollout_and_a_hint(what: str, says: str) -> None:
    good, bad = sample([9] * 5), with_routes(sample([9] * 5), broken(what))
    with pytest.raises(ParityError, match=f"g000003.1 .*{says}") as raised:
        RouteReplay(SIZES, step=9, max_lag=1).routes([good, bad], [4, 4])
    assert raised.value.facts
    assert raised.value.hint
    assert "position" in str(raised.value)
