"""Kimi K2: the architecture of DeepSeek-V3. Kimi K2.5 is a model for images and text with such a text model."""

from __future__ import annotations

from collections.abc import Iterable

from etude.models.config import ModelConfig, ModelFamily
from etude.models.families.deepseek_v3 import DeepseekV3


class KimiK2(DeepseekV3):
    """Kimi K2 (arXiv 2507.20534), and the text model of Kimi K2.5."""

    model_type = "kimi_k2"
    wrappers = ("kimi_k25",)
    wrapped = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
    skipped = ("vision_tower.", "mm_projector.")

    def unused(self, names: Iterable[str], c: ModelConfig) -> set[str]:
        names = list(names)
        return super().unused(names, c) | ModelFamily.unused(self, names, c)
