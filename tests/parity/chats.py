"""Tokenisers and templates of the shapes that Qwen3 and DeepSeek-V3 have, as a checkpoint's directory brings them."""

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


def make(folder: Path, name: str) -> Path:
    """Write the tokeniser's files of `name`, "qwen" or "deepseek"; its first ids are the added tokens."""
    tokens = QWEN_TOKENS if name == "qwen" else DEEPSEEK_TOKENS
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["the weather in Paris is sunny and mild"] * 4, trainer)
    for token, special in tokens.items():
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    begins, ends = ("<|endoftext|>", "<|im_end|>") if name == "qwen" else tuple(tokens)[:2]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begins if name == "deepseek" else None,
        "eos_token": {"content": ends, "__type": "AddedToken", "special": True},
        "pad_token": begins,
        "clean_up_tokenization_spaces": False,
    }
    template = (TEMPLATES / f"{name}.jinja").read_text()
    if name == "deepseek":
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(ends)}))
    return folder
