"""Tokenisers and templates of the shapes that published checkpoints have, as a checkpoint's directory brings them."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "templates"
QWEN_TOKENS = {
    "<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True, "<tool_call>": False, "</tool_call>": False,
    "<tool_response>": False, "</tool_response>": False, "<think>": False, "</think>": False,
}  # fmt: skip
DEEPSEEK_TOKENS = {
    "<｜begin▁of▁sentence｜>": True, "<｜end▁of▁sentence｜>": True, "<｜User｜>": False, "<｜Assistant｜>": False,
    "<｜tool▁calls▁begin｜>": False, "<｜tool▁calls▁end｜>": False, "<｜tool▁call▁begin｜>": False,
    "<｜tool▁call▁end｜>": False, "<｜tool▁outputs▁begin｜>": False, "<｜tool▁outputs▁end｜>": False,
    "<｜tool▁output▁begin｜>": False, "<｜tool▁output▁end｜>": False, "<｜tool▁sep｜>": False,
    "<think>": False, "</think>": False,
}  # fmt: skip
GLM_TOKENS = {
    "<|endoftext|>": True, "[gMASK]": True, "<sop>": True, "<|system|>": True, "<|user|>": True, "<|assistant|>": True,
    "<|observation|>": True, "<think>": False, "</think>": False, "<tool_call>": False, "</tool_call>": False,
    "<tool_response>": False, "</tool_response>": False, "<arg_key>": False, "</arg_key>": False,
    "<arg_value>": False, "</arg_value>": False,
}  # fmt: skip
MINIMAX_TOKENS = {
    "]~!b[": True, "]~b]": True, "[e~[": True, "<minimax:tool_call>": False, "</minimax:tool_call>": False,
    "<think>": False, "</think>": False,
}  # fmt: skip
LLAMA_TOKENS = {
    "<|begin_of_text|>": True, "<|end_of_text|>": True, "<|start_header_id|>": True, "<|end_header_id|>": True,
    "<|eom_id|>": True, "<|eot_id|>": True, "<|python_tag|>": True,
}  # fmt: skip
HARMONY_TOKENS = {
    "<|startoftext|>": True, "<|endoftext|>": True, "<|return|>": True, "<|constrain|>": True, "<|channel|>": True,
    "<|start|>": True, "<|end|>": True, "<|message|>": True, "<|call|>": True,
}  # fmt: skip
KINDS = {  # added tokens; token that begins a text; tokens that end a completion, of which the first is eos_token
    "qwen": (QWEN_TOKENS, "<|endoftext|>", ["<|im_end|>"]),
    "deepseek": (DEEPSEEK_TOKENS, "<｜begin▁of▁sentence｜>", ["<｜end▁of▁sentence｜>"]),
    "glm": (GLM_TOKENS, "<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "minimax": (MINIMAX_TOKENS, "]~!b[", ["[e~["]),
    "harmony": (HARMONY_TOKENS, "<|startoftext|>", ["<|return|>", "<|endoftext|>", "<|call|>"]),
    "llama": (LLAMA_TOKENS, "<|begin_of_text|>", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
}


def make(folder: Path, name: str) -> Path:
    """Write the tokeniser's files of `name`, one of `KINDS`."""
    tokens, begins, ends = KINDS[name]
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the weather in Paris is sunny and mild"] * 4, trainer)
    for token, special in tokens.items():
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if name == "qwen" else begins,
        "eos_token": {"content": ends[0], "__type": "AddedToken", "special": True},
        "pad_token": begins,
        "clean_up_tokenization_spaces": False,
    }
    template = (TEMPLATES / f"{name}.jinja").read_text()
    if name == "deepseek":
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.token_to_id(end) for end in ends]})
    )
    return folder
