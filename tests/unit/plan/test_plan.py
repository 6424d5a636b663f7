from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tests.unit.plan.models import QWEN

from etude import cli
from etude.config import to_toml
from etude.errors import RunError
from etude.loop.config import RunConfig
from etude.loop.measured_steps import MeasuredSteps
from etude.models import Transformer
from etude.models.components import GatedDelta, Latent, Routing, Scores
from etude.models.config import ModelConfig
from etude.models.lora import Adapters
from etude.numerics.config import NumericsConfig, Quantise
from etude.numerics.factory import operators_for
from etude.plan import (
    Layout,
    Measured,
    Region,
    Shape,
    Training,
    critical_batch,
    device,
    engine_remedies,
    learner_remedies,
    plan,
)
from etude.plan.arithmetic import (
    activation_bytes,
    active_parameters,
    base_bytes,
    delta_bytes,
    expert_adapters,
    forward_flops,
    kv_bytes_token,
    optimiser_bytes,
    read_bytes,
    rounded_bytes,
    state_bytes,
    trained_parameters,
    training_flops,
    used_experts,
    weights_bytes,
)
from etude.plan.hardware import MATRIX_BYTES
from etude.plan.planning import all_gather_s, dispatch_s, memory_of, sharing_s
from etude.records.adapter import AdapterConfig
from etude.run import RunFolder
from etude.training.config import LiveWeights, LoraOn
from etude.training.muon import Muon
from etude.training.process_group import SINGLE_PROCESS
from etude.training.trainable import lora_modules

SHAPE = Shape(16, 16, turns=20.0, prompt_tokens=4000.0, sampled_tokens=8000.0, tool_tokens=8000.0, tool_s=1.0)
WIDE = Layout(learner_ranks=8, engines=8, max_sequences=16, kv_tokens=16 * 32768, max_running=96)
CPU = Measured(
    cores=2,
    memory_bytes=25e9,
    training_s=0.01,
    training_s_token=1e-4,
    prefill_s_token=4e-5,
    decode_s=4e-3,
    decode_s_sequence=5e-5,
    publish_s=0.05,
    follow_s=0.05,
    request_s=0.0,
    turn_s=3e-3,
    grade_s=0.02,
    conductor_s=1e-3,
)


def test_a_known_model_has_its_published_sizes():
    assert QWEN.num_parameters == pytest.approx(30.5e9, rel=0.01)
    assert active_parameters(QWEN) + QWEN.vocab_size * QWEN.hidden_size == pytest.approx(3.3e9, rel=0.02)
    assert kv_bytes_token(QWEN) == 48 * 2 * 4 * 128 * 2
    whole = Training()
    assert weights_bytes(QWEN, whole, 8) + optimiser_bytes(QWEN, whole, 8) == 20 * QWEN.num_parameters / 8


def test_a_learner_with_adapters_has_one_copy_of_the_model_on_its_devices_and_its_matrices_on_the_host():
    narrow, wide = (Training(lora_rank=32, recompute=True, gathered_bytes=width) for width in (2, 4))
    adapters = 4 * trained_parameters(QWEN, narrow)
    assert weights_bytes(QWEN, narrow, 4) - adapters == 2 * QWEN.num_parameters / 4
    assert weights_bytes(QWEN, wide, 4) - adapters == 4 * QWEN.num_parameters / 4
    assert 2 * 0.95 * QWEN.num_parameters < base_bytes(QWEN, narrow, 1) < 2 * QWEN.num_parameters
    layout = Layout(learner_ranks=4, training=replace(narrow, expert_parallel=4), budget_tokens=8192)
    learner, _ = memory_of(QWEN, layout, 80e9, 80e9)
    assert learner.fits, "a 30B model with adapters, on four H100"
    assert learner.host == base_bytes(QWEN, narrow, 4)


K2 = ModelConfig(  # Kimi K2 as its config.json describes it: 1.03T parameters, 32B active
    family="deepseek_v3",
    hidden_size=7168,
    num_layers=61,
    num_heads=64,
    num_kv_heads=64,
    head_dim=192,
    vocab_size=163840,
    dense_layers=(0,),
    dense_size=18432,
    expert_size=2048,
    num_experts=384,
    top_k=8,
    num_shared=1,
    latent=Latent(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=1536),
    routing=Routing(scores=Scores.SIGMOID),
    context_tokens=131072,
)


def test_qwen3_30b_on_eight_devices_by_hand():
    layout = replace(WIDE, max_sequences=32, kv_tokens=32 * 32768, training=Training(recompute=True))
    h100, h200 = (memory_of(QWEN, layout, device(n).memory_bytes, device(n).memory_bytes) for n in ("h100", "h200"))
    # a rank: 30.53e9 parameters x 20 bytes / 8 ranks
    assert h100[0].weights + h100[0].optimiser == pytest.approx(76.3e9, rel=0.01)
    assert (h100[0].fits, h200[0].fits) == (False, True)  # of 80 and of 141 GB, activations beside them
    # an engine on one device: 30.53e9 x 2 bytes; 48 layers x 4 heads x (128 + 128) x 2 bytes x 1,048,576 tokens
    assert h200[1].weights == pytest.approx(61.1e9, rel=0.01)
    assert h200[1].cache == 48 * 4 * 256 * 2 * 1_048_576 == 103_079_215_104
    assert not h200[1].fits
    # on eight: 1/8 of the weights, but 4 heads cannot be divided by 8: each device has one, a quarter of the cache
    shared = memory_of(QWEN, replace(layout, engine_ranks=8), 80e9, 80e9)[1]
    assert shared.cache == 103_079_215_104 / 4
    assert shared.weights == pytest.approx(7.63e9, rel=0.01)
    assert shared.fits


def test_kimi_k2_on_sixty_four_h200_by_hand():
    assert K2.num_parameters == pytest.approx(1.027e12, rel=0.01)
    layout = Layout(learner_ranks=64, engines=1, engine_ranks=16, kv_tokens=100_000, training=Training(recompute=True))
    learner, engine = memory_of(K2, layout, 141e9, 141e9)
    # a rank: 1.027e12 x 20 bytes / 64 = 321 GB of 141: it takes 256
    assert learner.weights + learner.optimiser == pytest.approx(321e9, rel=0.01)
    assert not learner.fits
    assert "learner.ranks = 256" in list(learner_remedies(K2, layout, 141e9))
    assert memory_of(K2, replace(layout, learner_ranks=256), 141e9, 141e9)[0].fits
    # an engine: a latent of 512 + 64 numbers x 61 layers x 2 bytes, whole on each of its 16 devices
    assert engine.cache == 61 * 576 * 2 * 100_000 == 7_027_200_000
    assert engine.weights == pytest.approx(1.027e12 * 2 / 16, rel=0.01)
    assert engine.fits
    eight = replace(layout, engine_ranks=8)
    assert not memory_of(K2, eight, 141e9, 141e9)[1].fits  # 257 GB a device in bf16
    assert any("--engine-ranks 16" in one for one in engine_remedies(K2, eight, 141e9))
    assert any("nvfp4" in one for one in engine_remedies(K2, eight, 141e9))


def test_every_format_that_engines_compute_in_has_its_width_and_is_suggested_where_it_fits():
    assert MATRIX_BYTES == {Quantise.MXFP8: 33 / 32, Quantise.MXFP4: 17 / 32, Quantise.NVFP4: 9 / 16}
    assert {*MATRIX_BYTES, Quantise.NONE} == {*Quantise}
    layout = Layout(learner_ranks=64, engines=1, engine_ranks=8, kv_tokens=100_000)
    found = [one for one in engine_remedies(K2, layout, 141e9) if "quantise" in one]
    assert {one.partition("= ")[2].strip('"') for one in found} >= {"mxfp4", "nvfp4"}


def test_adapters_of_experts_are_divided_by_the_ranks_that_share_them():
    one, eight = (Training(lora_rank=8, expert_parallel=n) for n in (1, 8))
    of_experts = expert_adapters(QWEN, one)
    assert of_experts == 8 * 48 * 128 * (2 * (768 + 2048) + (2048 + 768))  # A and B of gate, up and down
    dense = trained_parameters(QWEN, one) - of_experts
    assert optimiser_bytes(QWEN, one, 8) == 16 * (dense + of_experts)
    assert optimiser_bytes(QWEN, eight, 8) == 16 * (dense + of_experts / 8)


def test_the_planned_traffic_of_ranks_equals_hand_computed_bytes():
    h200, whole = device("h200"), 8e9
    assert all_gather_s(whole, 1, h200) == 0
    assert all_gather_s(whole, 8, h200) == pytest.approx(7e9 / 450e9)  # 7/8 over NVLink
    # two nodes: each lacks half, which comes over its 8 cards of 50 GB/s: 10 ms; inside 15/16 over NVLink: 16.7 ms
    assert all_gather_s(whole, 16, h200) == pytest.approx(7.5e9 / 450e9)
    slow = replace(h200, network_bytes_s=5e9)
    assert all_gather_s(whole, 16, slow) == pytest.approx(4e9 / 40e9)  # a slow network is what is waited for
    # weights twice in bf16, gradients once in float32
    dense = ModelConfig(family="qwen3", num_experts=0, top_k=0, dense_size=512)
    assert sharing_s(dense, Training(gathered_bytes=2), 8, h200) == pytest.approx(
        8 * dense.num_parameters * 7 / 8 / 450e9
    )
    # 1,000 tokens x 8 experts x 2048 numbers x 2 bytes x 48 layers, there and back, forward and backward, 7/8 of them
    training = Training(expert_parallel=8, dtype_bytes=2)
    assert dispatch_s(QWEN, training, 1000, h200) == pytest.approx(1000 * 8 * 2048 * 2 * 48 * 4 * 7 / 8 / 450e9)


def test_across_nodes_a_learner_waits_for_its_network_and_an_engine_for_its_all_reduces():
    inside, across = (plan(QWEN, SHAPE, replace(WIDE, learner_ranks=n), device("h200")) for n in (8, 64))
    assert across.communication_s / across.learner_s > inside.communication_s / inside.learner_s
    shared = plan(QWEN, SHAPE, replace(WIDE, engine_ranks=8), device("h200"))
    alone = plan(QWEN, SHAPE, WIDE, device("h200"))
    assert alone.decode_tokens_s < shared.decode_tokens_s < 8 * alone.decode_tokens_s


def test_the_farthest_region_decides_when_a_version_is_everywhere():
    near = replace(WIDE, regions=(Region("a", 8),))
    far = replace(WIDE, regions=(Region("a", 4), Region("b", 4, 1.25e8, 0.2)))
    one, two = (plan(QWEN, SHAPE, layout, device("h200")) for layout in (near, far))
    assert two.sync_s - one.sync_s == pytest.approx(one.sync_bytes * (1 / 1.25e8 - 1 / 1.25e9) + 0.6)
    assert 0 < two.rollout_s - one.rollout_s < 20 * 0.1  # 20 turns, half of them 200 ms away; fewer decode together


def test_a_latent_is_kept_once_for_all_heads():
    latent = Latent(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128, q_rank=1536)
    model = ModelConfig(
        family="deepseek_v3",
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        hidden_size=7168,
        num_layers=61,
        dense_layers=(0, 1, 2),
        num_shared=1,
        latent=latent,
        routing=Routing(scores=Scores.SIGMOID),
    )
    assert kv_bytes_token(model) == 61 * (512 + 64) * 2  # 70 kB a token, as its makers say


def test_gated_delta_layers_keep_a_state_and_no_keys():
    linear = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    layers = tuple(i for i in range(48) if (i + 1) % 4)
    model = ModelConfig(
        family="qwen3_next",
        num_layers=48,
        num_kv_heads=2,
        head_dim=256,
        num_shared=1,
        linear=linear,
        linear_layers=layers,
    )
    assert kv_bytes_token(model) == 12 * 2 * 2 * 256 * 2
    assert state_bytes(model) == 36 * (32 * 128 * 128 + 3 * 8192) * 4
    more = forward_flops(model, 2000) - forward_flops(model, 1000)
    assert more == 12 * 4 * 2 * 2 * 256 * 1000  # of the layers with keys alone


def test_a_small_batch_reads_the_experts_that_it_meets_and_a_large_one_all():
    assert used_experts(QWEN, 1) == pytest.approx(8 / 128)
    assert read_bytes(QWEN, 1) == pytest.approx(2 * active_parameters(QWEN), rel=1e-3)
    assert read_bytes(QWEN, 1e6) == pytest.approx(2 * (QWEN.num_parameters - QWEN.vocab_size * 2048), rel=1e-6)


def test_the_critical_batch_is_where_arithmetic_takes_as_long_as_reading():
    h200 = device("h200")
    batch = critical_batch(QWEN, h200)
    compute, read = 2 * active_parameters(QWEN) * batch / h200.flops, read_bytes(QWEN, batch) / h200.bytes_s
    assert compute == pytest.approx(read, rel=1e-6)
    dense = ModelConfig(family="qwen3", num_experts=0, top_k=0, dense_size=512, tie_embeddings=True)
    assert critical_batch(dense, h200) == pytest.approx(h200.flops / h200.bytes_s, rel=1e-6)  # 2 operations, 2 bytes


def test_training_is_three_forwards_and_a_fourth_where_activations_are_computed_again():
    assert training_flops(QWEN, 100, Training()) == 3 * forward_flops(QWEN, 100)
    assert training_flops(QWEN, 100, Training(recompute=True)) == 4 * forward_flops(QWEN, 100)
    kept, again = (activation_bytes(QWEN, 8192, Training(recompute=recompute)) for recompute in (False, True))
    assert again < kept / 5


def held_bytes(config: ModelConfig, tokens: int, quantise: Quantise = Quantise.NONE) -> int:
    """The bytes that a forward pass holds for its backward pass, beside the weights."""
    held = {}
    model = Transformer(config, seed=0, operators=operators_for(NumericsConfig(quantise=quantise), torch.float32))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            held[memory.data_ptr()] = (memory.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        kept_by = model(torch.arange(tokens) % config.vocab_size)  # held until they are counted
    assert kept_by[0].requires_grad
    return sum(size for size, _ in held.values())


def test_kept_activations_are_what_a_forward_holds_for_its_backward_pass():
    config, tokens = ModelConfig(), 256
    logits = 2 * 4 * tokens * config.vocab_size
    assert activation_bytes(config, tokens, Training()) - logits == pytest.approx(held_bytes(config, tokens), rel=0.1)


def test_a_plan_counts_the_rounded_matrices_that_a_forward_holds_for_its_backward_pass():
    config, tokens = ModelConfig(), 64
    low = Training(quantised=True)
    assert held_bytes(config, tokens, Quantise.MXFP8) - held_bytes(config, tokens) == rounded_bytes(config, low)
    assert rounded_bytes(config, replace(low, recompute=True)) == rounded_bytes(config, low) / config.num_layers
    shared = memory_of(QWEN, Layout(learner_ranks=8, training=replace(low, expert_parallel=8)), 1e12, 1e12)[0]
    plain = memory_of(QWEN, Layout(learner_ranks=8), 1e12, 1e12)[0]
    kept = shared.activations - plain.activations
    assert 4 * QWEN.num_parameters / 8 < kept < 4 * QWEN.num_parameters / 4, (
        "all dense matrices, and an eighth of experts"
    )


@pytest.mark.parametrize("sizes", [{}, {"family": "qwen3", "num_experts": 0, "top_k": 0, "dense_size": 96}])
def test_of_adapters_and_muon_a_plan_counts_the_numbers_that_the_learners_optimiser_holds(sizes):
    config = ModelConfig(**sizes)
    model = Transformer(config, seed=0)
    muon = Muon(model, exchange=SINGLE_PROCESS, weights=LiveWeights.BF16)
    state = muon.state()
    held = sum(vector.numel() for vector in (muon.grad, state["master"], state["first"], state["second"]))
    assert optimiser_bytes(config, Training(muon=True), 1) == 4 * held
    for on in LoraOn:
        chosen = AdapterConfig(4, 32.0, lora_modules(Transformer(config, seed=0), on), "")
        adapters = Adapters(Transformer(config, seed=0), chosen, dtype=torch.bfloat16)
        training = Training(lora_rank=4, lora_on=str(on))
        assert trained_parameters(config, training) == sum(p.numel() for p in adapters.parameters())
        assert optimiser_bytes(config, training, 1) == 16 * trained_parameters(config, training)


def test_a_delta_grows_with_the_share_that_changed_and_never_past_the_weights():
    sizes = [delta_bytes(QWEN.num_parameters, share) for share in (0.0, 0.01, 0.05, 0.3, 0.99, 1.0)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0.0
    assert sizes[-1] == 2 * QWEN.num_parameters
    assert sizes[-1] / sizes[2] > 20


def test_twice_the_engines_halve_their_time_until_another_thing_bounds_the_step():
    layouts = [replace(WIDE, engines=n, max_running=12 * n) for n in (8, 16)]
    few, many = (plan(QWEN, SHAPE, layout, device("h200")) for layout in layouts)
    assert few.bound_by == "the engines"
    assert many.engines_s == pytest.approx(few.engines_s / 2, rel=0.01)
    assert many.step_s < few.step_s
    assert few.inference_to_training == pytest.approx(many.inference_to_training, rel=0.01)
    slow = plan(QWEN, SHAPE, replace(WIDE, engines=64, max_running=768, learner_ranks=1), device("h200"))
    assert slow.bound_by == "the learner"
    assert not slow.learner_memory.fits


def test_on_a_cpu_the_cores_are_shared_and_the_learner_is_one_thread():
    shape = Shape(8, 8, turns=5.0, prompt_tokens=76.0, sampled_tokens=27.0, tool_tokens=0.0, solved_share=0.8)
    layout = Layout(engines=2, max_sequences=88, max_running=132, max_lag=1)
    found = plan(ModelConfig(), shape, layout, CPU)
    assert found.bound_by == "the cores"
    work = found.learner_device_s + found.engine_device_s + found.machines_s
    assert found.step_s == pytest.approx(work / 2)
    alone = plan(ModelConfig(), shape, layout, replace(CPU, cores=64))
    assert alone.step_s == max(alone.learner_s, alone.engine_device_s / 2)


def test_a_checkpoint_is_planned_for_by_its_config_alone_and_without_torch(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN.to_hf()))
    argv = ["plan", str(tmp_path), "--hardware", "b200", "--learner-ranks", "16", "--engines", "16", "--json"]
    argv += ["--set", "learner.recompute=true"]
    assert cli.main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["learner_memory"]["fits"]
    assert told["plan"]["step_dollars"] == pytest.approx(32 * 5.5 / 3600 * told["plan"]["step_s"])
    program = "import sys; from etude import cli; cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, *argv], check=True, capture_output=True)


def planned(config, capsys, *words: str) -> dict:
    """What is told of a config of eight ranks and three engines on an accelerator."""
    config.write_text(
        """[learner]\nranks = 8\nrecompute = true\n[fleet]\nengines = ["reference", "reference", "reference"]\n"""
    )
    assert cli.main(["plan", str(config), "--hardware", "h200", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_of_the_configs_learner_and_engines_and_flags_override_them(tmp_path, capsys):
    config = tmp_path / "config.toml"
    layout = planned(config, capsys)["layout"]
    assert (layout["learner_ranks"], layout["engines"], layout["training"]["recompute"]) == (8, 3, True)
    layout = planned(config, capsys, "--learner-ranks", "2", "--engines", "5")["layout"]
    assert (layout["learner_ranks"], layout["engines"]) == (2, 5)


def test_rollouts_that_a_step_samples_in_search_of_signal_are_counted(tmp_path, capsys):
    config, half = tmp_path / "config.toml", ("--signal-share", "0.5")
    plain = planned(config, capsys, *half)
    picky = planned(config, capsys, *half, "--set", "experience.signal_groups=16")
    assert plain["shape"]["groups"] == 16
    assert 34 <= picky["shape"]["groups"] <= 40  # half have a signal: a second round, and often a third
    more = picky["shape"]["groups"] / 16
    assert picky["plan"]["learner_device_s"] == pytest.approx(more * plain["plan"]["learner_device_s"])
    assert picky["plan"]["engines_s"] > plain["plan"]["engines_s"]
    assert planned(config, capsys, "--set", "experience.signal_groups=16")["shape"]["groups"] == 16  # all have one


def test_adapters_muon_and_kept_activations_change_what_a_rank_holds_and_how_long_it_trains(tmp_path, capsys):
    def told(*settings: str) -> dict:
        words = [word for setting in settings for word in ("--set", setting)]
        return planned(tmp_path / "config.toml", capsys, "--learner-ranks", "1", *words)["plan"]

    again, kept = told(), told("learner.recompute=false")
    muon, adapters = told('learner.optimizer="muon"'), told("learner.lora_rank=4")
    assert again["learner_s"] == pytest.approx(kept["learner_s"] * 4 / 3)
    assert again["learner_memory"]["activations"] < kept["learner_memory"]["activations"]
    assert muon["learner_memory"]["optimiser"] < 0.9 * again["learner_memory"]["optimiser"]
    assert adapters["learner_memory"]["optimiser"] < 0.3 * again["learner_memory"]["optimiser"]
    assert adapters["learner_memory"]["weights"] > again["learner_memory"]["weights"]
    assert adapters["sync_bytes"] < 0.3 * again["sync_bytes"]


def test_a_plan_that_does_not_fit_fails_and_names_settings_that_would(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN.to_hf()))
    argv = ["plan", str(tmp_path), "--hardware", "h100", "--learner-ranks", "8", "--engines", "8"]
    for setting in ("numerics.mode=native", "engine.dtype=bfloat16", "engine.max_sequences=64"):
        argv += ["--set", setting]
    argv += ["--set", "engine.context_tokens=32768", "--set", "harness.context_tokens=8192"]
    assert cli.main(argv) == 1
    printed, error = capsys.readouterr()
    assert "$" not in printed
    assert "error: not enough memory: a rank of the learner needs" in error
    settings = 'learner.moments = "8bit" and learner.recompute = true'
    ranks = "learner.ranks = 16 and learner.recompute = true | adapters: learner.lora_rank = 32"
    assert f"would fit: {settings} | {ranks}" in error
    assert "a device of an engine needs" in error
    assert "--engine-ranks " in error
    argv += ["--learner-ranks", "16", "--set", "learner.recompute=true", "--engine-ranks", "4"]
    assert cli.main(argv) == 0, capsys.readouterr().err


def test_vllms_room_for_keys_and_values_is_the_configs(tmp_path, capsys):
    config = tmp_path / "config.toml"
    native = '[numerics]\nmode = "native"\n[fleet]\nengines = ["vllm"]\n[vllm]\nkv_tokens = 4096\n'
    config.write_text(f'{native}arguments = ["--tensor-parallel-size=4"]\n[engine]\nmax_sequences = 64\n')
    assert cli.main(["plan", str(config), "--hardware", "h200", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["kv_tokens"], layout["max_sequences"]) == (4096, 4)  # contexts of 1,024 tokens
    assert layout["engine_ranks"] == 4
    config.write_text("[engine]\nmax_sequences = 64\n")
    assert cli.main(["plan", str(config), "--hardware", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["kv_tokens"] == 64 * 1024


def test_prices_are_of_the_kind_of_hardware_and_engines_may_have_another(tmp_path, capsys):
    prices = ["--price", "h200=4", "--price", "h100=1", "--engine-hardware", "h100"]
    plan_ = planned(tmp_path / "config.toml", capsys, *prices)["plan"]
    hours = plan_["step_s"] / 3600
    assert plan_["dollars"] == pytest.approx({"learner": 8 * 4 * hours, "engines": 3 * 1 * hours})
    assert plan_["engine_memory"]["capacity"] == 80e9


def test_regions_are_given_by_name_engines_bandwidth_and_round_trip(tmp_path, capsys):
    words = ["--region", "here:2:100:0.2", "--region", "tokyo:1:10:160"]
    regions = planned(tmp_path / "config.toml", capsys, *words)["layout"]["regions"]
    assert regions[1] == {"name": "tokyo", "engines": 1, "bytes_s": 1.25e9, "round_trip_s": 0.16}


def test_where_nothing_is_trained_on_a_plan_is_still_told(tmp_path, capsys):
    assert planned(tmp_path / "config.toml", capsys, "--signal-share", "0")["plan"]["inference_to_training"] == 0


@pytest.mark.parametrize(
    ("flag", "value", "range_"),
    [
        ("--turns", "-3", "1 to 1e+06"),
        ("--turns", "nan", "1 to 1e+06"),
        ("--prompt-tokens", "inf", "0 to 1e+09"),
        ("--sampled-tokens", "-5", "1 to 1e+09"),
        ("--tool-tokens", "many", "0 to 1e+09"),
        ("--tool-s", "-100", "0 to 1e+06"),
        ("--signal-share", "5", "0 to 1"),
        ("--solved-share", "-1", "0 to 1"),
        ("--changed-share", "2", "0 to 1"),
        ("--link-gbits", "0", "0.001 to 1e+06"),
        ("--link-gbits", "-1", "0.001 to 1e+06"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_the_range(capsys, flag, value, range_):
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "config.toml", flag, value])
    assert ended.value.code == 2
    assert f"argument {flag}: {value!r} is not a number from {range_}\n  hint: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt-tokens", "96", "--sampled-tokens", "12000"], "rollouts of 12,096 tokens do not fit"),
        (["--engine-ranks", "999"], "--engine-ranks 999 does not divide"),
        (["--region", "tokyo:1"], "write it as NAME:ENGINES:GBITS:MS"),
        (["--region", "tokyo:7:10:160"], "the regions have 7 engines: there are 2"),
        (["--region", "tokyo:2:nan:160"], "'nan' is not a number"),
        (["--price", "h20=3"], "--price 'h20=3': unknown hardware"),
        (["--price", "h200=-3"], "is not a number of at least 0"),
        (["--engine-hardware", "h20"], "unknown hardware 'h20'"),
    ],
)
def test_what_no_run_has_is_not_planned(tmp_path, capsys, words, said):
    config = tmp_path / "config.toml"
    config.write_text("[harness]\ncontext_tokens = 512\n")
    assert cli.main(["plan", str(config), "--hardware", "h200", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "hint: " in error


def test_a_rank_holds_a_whole_text_or_its_share_of_it(tmp_path, capsys):
    lengths = ["--set", "harness.context_tokens=32768", "--set", "engine.context_tokens=32768"]
    lengths += ["--set", "model.context_tokens=32768"]
    whole = planned(tmp_path / "config.toml", capsys, *lengths)["layout"]
    shared = planned(tmp_path / "config.toml", capsys, *lengths, "--set", "learner.context_parallel=2")["layout"]
    assert (whole["budget_tokens"], shared["budget_tokens"]) == (32768, 16384)


def test_a_machine_that_cannot_be_measured_keeps_its_cause(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig().to_hf()))
    assert cli.main(["plan", str(tmp_path)]) != 0
    first, hint = capsys.readouterr().err.splitlines()[-2:]
    assert first.startswith("error: this machine could not be measured: ")
    assert "hint" not in first
    assert f"no tokeniser in {tmp_path}" in first
    assert hint.startswith("  hint: ")
    assert hint.endswith("; or give the hardware: --hardware h200")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hardware", "h20"], "did you mean 'h200'?"),
        (["--set", "rl.stepz=3"], "did you mean 'rl.steps'?"),
        (["--set", "learner.lora_rank=4", "--set", "learner.optimizer=muon"], "set optimizer = 'adamw'"),
        (["--set", "learner.lora_rank=4000"], "an adapter of rank above"),
        (
            ["--set", "fleet.engines=[]", "--set", "fleet.listen=127.0.0.1:0"],
            "hint: give the number of engines that will join: --engines N",
        ),
    ],
)
def test_what_is_not_known_is_named(tmp_path, capsys, words, says):
    (tmp_path / "config.toml").write_text("seed = 0\n")
    assert cli.main(["plan", str(tmp_path / "config.toml"), *words]) == 2
    assert says in capsys.readouterr().err


def run_of(folder, num_steps: int, **facts: float) -> RunFolder:
    """A run whose conductor told of its steps: 2 s each, of which the learner took one."""
    run = RunFolder.create(folder, config_toml=to_toml(RunConfig()), seed=0)
    (run / "events").mkdir()
    step = {"kind": "rl.step", "num_groups": 16, "no_signal_share": 0.5, "num_tokens": 6400}
    step |= {"sampled_mean": 30.0, "turns_mean": 4.0, **facts}
    events = []
    for i in range(num_steps):
        t = 100.0 + 2 * i
        processes = {"learner": {"cpu_s": 1.0 * i}, "engine-0": {"cpu_s": 2.0 * i}, "worker-0": {"cpu_s": 0.5 * i}}
        events.append({**step, "t": t, "process": "conductor", "step": i + 1, "reward_mean": 0.25})
        events.append({"t": t, "process": "conductor", "kind": "usage", "processes": processes})
    (run / "events" / "conductor.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_a_runs_events_tell_the_shape_of_its_rollouts_and_what_a_step_took(tmp_path):
    found = MeasuredSteps.read(run_of(tmp_path / "run", 6), RunConfig())
    assert (found.num_steps, found.step_s) == (5, 2.0)
    assert found.cpu_s == {"learner": 1.0, "engines": 2.0, "machines": 0.5, "all": 3.5}
    assert (found.shape.context, found.shape.sampled_tokens, found.shape.turns) == (100.0, 30.0, 4.0)
    assert found.shape.solved_share == 0.25


def test_a_run_that_went_on_for_signal_is_planned_with_the_groups_that_it_took(tmp_path):
    found = MeasuredSteps.read(run_of(tmp_path / "run", 6, num_groups=40, no_signal_share=0.8), RunConfig()).shape
    assert (found.groups, found.rollouts) == (40.0, 320.0)
    assert found.signal_share == pytest.approx(0.2)
    assert found.context == pytest.approx(6400 / (8 * 8))


def test_a_run_of_two_steps_holds_nothing_to_a_plan(tmp_path):
    with pytest.raises(RunError, match="has 2 steps"):
        MeasuredSteps.read(run_of(tmp_path / "run", 2), RunConfig())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_this_machine_is_measured_for_a_config_in_some_seconds(tmp_path, cli_in, game):
    done = cli_in(tmp_path)("plan", game.config, "--json", timeout_s=1500)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["hardware"]["training_s_token"] > 0
    assert told["hardware"]["turn_s"] > 0
    assert told["plan"]["bound_by"] in ("the cores", "the learner", "an engine")
