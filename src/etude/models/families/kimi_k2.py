"""Kimi K2: the architecture of DeepSeek-V3."""

from __future__ import annotations

from etude.models.families.deepseek_v3 import DeepseekV3


class KimiK2(DeepseekV3):
    """Kimi K2 (arXiv 2507.20534)."""

    model_type = "kimi_k2"
