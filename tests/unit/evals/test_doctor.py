"""The doctor: planted faults are named, clean engines raise nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.tiers import first_few
from tests.unit.models.families import FAMILIES

from etude.errors import EngineError
from etude.evals.doctor.diagnosis import Verdict, examine
from etude.evals.doctor.local import findings
from etude.evals.doctor.sides import LearnerSide, ReferenceEngineSide
from etude.evals.parity import Budget
from etude.inference.operator_trace import engine_results
from etude.models import ModelConfig, Transformer
from etude.models.components import Routing, Scores
from etude.models.packed_weights import PackedWeights
from etude.numerics import Exact, Native, NumericsConfig, Operators, Quantise
from etude.numerics.factory import operators_for
from etude.numerics.formats import FORMATS

SIZES = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    expert_size=24,
    num_experts=6,
    top_k=2,
    context_tokens=256,
)
TOKENS = torch.randint(0, 97, (48,), generator=torch.Generator().manual_seed(0)).tolist()
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Maker = Callable[[torch.dtype], Transformer]


def model(dtype: torch.dtype, operators: type[Operators] = Native, sizes: ModelConfig = SIZES) -> Transformer:
    made = Transformer(sizes, seed=1, dtype=dtype, operators=operators(dtype))
    with torch.no_grad():  # norms that are not one: a missing weight must show
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)), alpha=0.1)
    return made


def changed(change: Callable[[Transformer], None]) -> Maker:
    def make(dtype: torch.dtype) -> Transformer:
        made = model(dtype)
        with torch.no_grad():
            change(made)
        return made

    return make


class SlotsSwapped(Native):
    def combine(self, out_SD: torch.Tensor, slot_NK: torch.Tensor, gates_NK: torch.Tensor) -> torch.Tensor:
        return super().combine(out_SD, slot_NK.flip(1), gates_NK)


class RouterInHalf(Native):
    def router_scores(self, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        return super().router_scores(x_ND.bfloat16(), weight_ED.bfloat16()).to(torch.float32)


class NormForgotten(Native):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return super().rms_norm(x, None, eps)


class TurnedTheOtherWay(Native):
    def rotate(self, x_NHA: torch.Tensor, cos_N1A: torch.Tensor, sin_N1A: torch.Tensor) -> torch.Tensor:
        return super().rotate(x_NHA, cos_N1A, -sin_N1A)


def stale(made: Transformer) -> None:
    weight = made.blocks[1].attention.out
    weight += 0.004 * weight.abs().mean() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))


def gate_and_up_swapped(made: Transformer) -> None:
    weight = made.blocks[0].experts.gate_up
    weight[3] = torch.cat(weight[3].chunk(2)[::-1])


def experts_swapped(made: Transformer) -> None:
    weight = made.blocks[1].experts.down
    weight[[0, 1]] = weight[[1, 0]]


def transposed(made: Transformer) -> None:
    weight = made.blocks[0].experts.router
    weight[:2, :2] = weight[:2, :2].T.clone()


FAULTS: dict[str, tuple[Maker, str]] = {
    "rotary tables in bf16": (
        changed(lambda m: (m.cos.copy_(m.cos.bfloat16()), m.sin.copy_(m.sin.bfloat16()))[0]),
        "layers.0.attention.rotated",
    ),
    "another theta": (lambda d: model(d, sizes=replace(SIZES, rope_theta=9_500.0)), "layers.0.attention.rotated"),
    "rotated the other way": (lambda d: model(d, TurnedTheOtherWay), "layers.0.attention.rotated"),
    "another epsilon": (lambda d: model(d, sizes=replace(SIZES, rms_eps=1e-5)), "layers.0.attention_norm"),
    "a norm without its weight": (lambda d: model(d, NormForgotten), "layers.0.attention_norm"),
    "experts combined in another order": (lambda d: model(d, SlotsSwapped), "layers.0.experts.mixed"),
    "a router in bf16": (lambda d: model(d, RouterInHalf), "layers.0.experts.scores"),
    "a stale weight": (changed(stale), "layers.1.attention.out"),
    "gate and up swapped in one expert": (changed(gate_and_up_swapped), "layers.0.experts.gate_up"),
    "two experts swapped": (changed(experts_swapped), "layers.1.experts.down"),
    "a transposed corner": (changed(transposed), "layers.0.experts.scores"),
    "softmax scale": (changed(lambda m: m.blocks[1].attention.q_norm.mul_(1.05)), "layers.1.attention.qk_norm"),
    "one row of the embedding": (changed(lambda m: m.embedding[TOKENS[5]].mul_(1.01)), "embedding"),
}
UNSEEN_IN_BF16 = {"rotary tables in bf16", "another epsilon", "a router in bf16"}
"""Within the rounding of bf16, where the learner does the same anyhow."""


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((fault, F32) for fault in FAULTS), *((fault, BF16) for fault in FAULTS if fault not in UNSEEN_IN_BF16)],
)
def test_a_planted_fault_is_named(fault: str, dtype: torch.dtype) -> None:
    make, name = FAULTS[fault]
    theirs = engine_results(make(dtype), TOKENS, prompt_tokens=20)
    found = findings(model(dtype), TOKENS, theirs, exact=False)
    assert found[0].name == name
    assert found[0].layer == (int(name.split(".")[1]) if "." in name else None)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("prompt_tokens", [1, 33, 48])
def test_a_clean_engine_raises_nothing(dtype: torch.dtype, prompt_tokens: int) -> None:
    theirs = engine_results(model(dtype), TOKENS, prompt_tokens=prompt_tokens)
    assert findings(model(dtype), TOKENS, theirs, exact=False) == []


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_engine_of_any_family_raises_nothing(family: str, dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 24, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    theirs = engine_results(model(dtype, sizes=FAMILIES[family]), tokens, prompt_tokens=25)
    assert findings(model(dtype, sizes=FAMILIES[family]), tokens, theirs, exact=False) == []


def test_a_stale_latent_projection_is_named() -> None:
    stale_up = model(F32, sizes=FAMILIES["deepseek-v3"])
    stale_up.blocks[1].attention.inward.data[3] *= 1.001
    tokens = torch.randint(0, 24, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    theirs = engine_results(stale_up, tokens, prompt_tokens=25)
    found = findings(model(F32, sizes=FAMILIES["deepseek-v3"]), tokens, theirs, exact=False)
    assert [one.name for one in found] == ["layers.1.attention.inward"]


@pytest.mark.parametrize("kind", [Quantise.MXFP8, Quantise.NVFP4])
def test_in_low_precision_a_clean_engine_raises_nothing_and_one_wrong_byte_is_named(kind: Quantise) -> None:
    sizes = replace(SIZES, head_dim=16, expert_size=32)
    numerics = NumericsConfig(quantise=kind)
    learner = Transformer(sizes, seed=1, operators=operators_for(numerics, F32))
    engine = Transformer(sizes, seed=1, operators=operators_for(numerics, F32, rounds_weights=False))
    held = PackedWeights(engine, FORMATS[kind])
    held.decode()
    assert findings(learner, TOKENS, engine_results(engine, TOKENS, prompt_tokens=20), exact=True) == []
    held.tensors["model.layers.1.self_attn.o_proj.weight_scale"].view(torch.uint8)[3, 0] += 1
    held.decode()
    found = findings(learner, TOKENS, engine_results(engine, TOKENS, prompt_tokens=20), exact=True)
    assert [one.name for one in found] == ["layers.1.attention.out"]


def test_an_operator_that_is_not_shown_counts_into_the_next_one() -> None:
    theirs = engine_results(changed(stale)(F32), TOKENS, prompt_tokens=20)
    del theirs["layers.1.attention.out"]
    first = findings(model(F32), TOKENS, theirs, exact=False)[0]
    assert (first.name, first.unseen) == ("layers.1.middle", ("layers.1.attention.out",))


def test_a_result_that_is_not_a_number_is_named() -> None:
    theirs = engine_results(model(F32), TOKENS, prompt_tokens=20)
    theirs["layers.1.attention.attended"] = theirs["layers.1.attention.attended"].clone()
    theirs["layers.1.attention.attended"][30, 2] = torch.nan
    first = findings(model(F32), TOKENS, theirs, exact=False)[0]
    assert (first.name, first.position) == ("layers.1.attention.attended", 30)


def test_results_of_another_model_are_refused() -> None:
    theirs = engine_results(model(F32, sizes=replace(SIZES, expert_size=16)), TOKENS, prompt_tokens=20)
    with pytest.raises(EngineError, match=r"layers.0.experts.gate_up with shape \[48, 2, 32\]"):
        findings(model(F32), TOKENS, theirs, exact=False)


LARGE = {
    "255, whose last number is a byte's": replace(SIZES, num_experts=255, expert_size=4, top_k=6),
    "qwen3-moe, 384": replace(SIZES, num_experts=384, expert_size=4, top_k=8),
    "deepseek-v3, 256": replace(
        FAMILIES["deepseek-v3"],
        num_experts=256, expert_size=4, top_k=8,
        routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=8, top_groups=4),
    ),
    "kimi k2, 384": replace(
        FAMILIES["deepseek-v3"], num_experts=384, expert_size=4, top_k=8, routing=Routing(Scores.SIGMOID, scaling=2.8)
    ),
}  # fmt: skip
SMALL_TOKENS = [token % 24 for token in TOKENS]


@pytest.mark.parametrize("name", first_few(LARGE, 2))
def test_a_clean_engine_of_hundreds_of_experts_raises_nothing(name: str) -> None:
    made = model(F32, sizes=LARGE[name])
    theirs = engine_results(made, SMALL_TOKENS, prompt_tokens=25)
    assert max(int(theirs[f"layers.{layer}.experts.used"].max()) for layer in made.config.moe_layers) > 250
    assert findings(model(F32, sizes=LARGE[name]), SMALL_TOKENS, theirs, exact=False) == []
    exact = [model(F32, Exact, sizes=LARGE[name]) for _ in range(3)]
    budget = Budget(0.0, 0.0)
    prompts = [SMALL_TOKENS[:20], SMALL_TOKENS[3:10]]
    found = examine(
        ReferenceEngineSide(exact[0]), LearnerSide(exact[1]), prompts, max_tokens=5, seed=0, exact=True, budget=budget
    )
    assert found.verdict is Verdict.EQUAL
    assert [way.replayed is not None and way.replayed.equal for way in found.ways] == [True] * 4


@pytest.mark.parametrize("expert", [-1, 384, 1 << 40])
def test_an_expert_that_does_not_exist_is_named_and_breaks_nothing(expert: int) -> None:
    sizes = LARGE["qwen3-moe, 384"]
    theirs = engine_results(model(F32, sizes=sizes), TOKENS, prompt_tokens=25)
    theirs["layers.1.experts.used"] = theirs["layers.1.experts.used"].clone()
    theirs["layers.1.experts.used"][30, 3] = expert
    first = findings(model(F32, sizes=sizes), TOKENS, theirs, exact=False)[0]
    assert (first.name, first.position, first.num_rows) == ("layers.1.experts.used", 30, 1)


def test_a_router_that_is_not_shown_leaves_the_others_routes_where_they_are() -> None:
    theirs = engine_results(model(F32), TOKENS, prompt_tokens=20)
    del theirs["layers.0.experts.used"]
    for name in ("used", "gates", "gate_up", "activated", "down"):  # the slots swapped
        theirs[f"layers.1.experts.{name}"] = theirs[f"layers.1.experts.{name}"].flip(1)
    assert findings(model(F32), TOKENS, theirs, exact=False) == []


def test_an_engine_of_another_model_is_refused_by_its_routes() -> None:
    engine = ReferenceEngineSide(model(F32, sizes=LARGE["qwen3-moe, 384"]))
    with pytest.raises(EngineError, match="do not fit the model of this command"):
        examine(engine, LearnerSide(model(F32)), PROMPTS, max_tokens=4, seed=0, exact=False, budget=Budget(1.0, 1.0))


PROMPTS = [TOKENS[:20], TOKENS[3:10], TOKENS[:31]]


def test_a_clean_engine_is_near_in_every_way() -> None:
    found = examine(
        ReferenceEngineSide(model(BF16)),
        LearnerSide(model(BF16)),
        PROMPTS,
        max_tokens=8,
        seed=0,
        exact=False,
        budget=Budget(k3=5e-3, ratio_p99=0.5),
    )
    assert [way.way for way in found.ways] == ["batched", "alone", "chunked", "cached"]
    assert found.verdict in (Verdict.NEAR, Verdict.EQUAL)
    assert all(way.replayed is not None and way.parity.num_tokens == 24 for way in found.ways)


def test_stale_weights_are_off_and_named() -> None:
    found = examine(
        ReferenceEngineSide(changed(stale)(F32)),
        LearnerSide(model(F32, Exact)),
        PROMPTS,
        max_tokens=8,
        seed=0,
        exact=False,
        budget=Budget(k3=1e-9, ratio_p99=1e-3),
    )
    assert found.verdict is Verdict.OFF
    assert found.plain()["findings"][0]["operator"] == "layers.1.attention.out"
