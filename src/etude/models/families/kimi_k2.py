"""Kimi K2: DeepSeek-V3 by another name."""

from __future__ import annotations

from etude.models.families.deepseek_v3 import DeepseekV3


class KimiK2(DeepseekV3):
    model_type = "kimi_k2"
