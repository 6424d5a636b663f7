"""Multi-token prediction heads against transformers' `MtpModel`, which loads the checkpoints that etude writes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.models import Transformer, load_model, save_model
from etude.models.attention import Packed
from etude.models.family_lookup import family_of
from etude.models.mtp import apply_head, head_logits, trunk_output

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

HEADS, LENGTH = 2, 20


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_moe"])
def test_transformers_predicts_the_same_with_the_heads_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    config = replace(family_of(family).tiny(), mtp_heads=HEADS)
    made, generator = Transformer(config, seed=3), torch.Generator().manual_seed(0)
    for one in (*made.parameters(), *(b for name, b in made.named_buffers() if name.endswith("bias"))):
        if one.ndim == 1:  # norms and biases, which are 1 and 0 in a new model
            one += 0.1 * torch.rand(one.shape, generator=generator)
    save_model(made, tmp_path / "model", dtype="f32")
    ours = load_model(tmp_path / "model").eval()
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    layers = "|".join(str(config.num_layers + number) for number in range(HEADS))
    reference._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({layers})\."]  # else only published sizes
    reference.config.num_mtp_layers = HEADS
    heads = MtpModel.from_pretrained(reference).eval()
    tokens, num = torch.randint(0, config.vocab_size, (LENGTH,), generator=generator), LENGTH - HEADS
    theirs = reference(tokens[None], output_hidden_states=True).hidden_states[-1][:, :num]
    outputs = trunk_output(ours, ours.run(tokens).stream)[:num]
    for number in range(HEADS):
        following = tokens[number + 1 : number + 1 + num]
        outputs, _ = apply_head(ours, number, outputs, following, Packed([num], ours.operators))
        places = torch.arange(num)[None] + number + 1
        theirs = heads.forward_layer(number, theirs, places, None, input_ids=following[None])
        assert torch.allclose(outputs, theirs[0], atol=2e-5)
        assert torch.allclose(head_logits(ours, outputs), heads._project_to_logits(theirs)[0], atol=2e-5)
