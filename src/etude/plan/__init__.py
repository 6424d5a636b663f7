"""Estimates a run before it starts: memory, critical batch size, step time, weight sync time, cost.

`plan` combines formulas with sources (`arithmetic`) and a few numbers for the hardware. The package does not import
torch: measurements of this machine are passed in.

>>> from etude.models.config import ModelConfig
>>> model = ModelConfig(hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151936,
...     expert_size=768, num_experts=128, top_k=8, context_tokens=32768)
>>> shape = Shape(16, 16, turns=20.0, prompt_tokens=4000.0, sampled_tokens=8000.0, tool_tokens=8000.0, tool_s=1.0)
>>> layout = Layout(learner_ranks=8, engines=8, max_sequences=32, kv_tokens=32 * 32768, max_running=192,
...     training=Training(recompute=True))
>>> found = plan(model, shape, layout, device("h200"))
>>> found.bound_by, round(found.learner_memory.total / 1e9), found.engine_memory.fits
('the engines', 92, False)
"""

from etude.plan.balance import sensitivity
from etude.plan.hardware import DEVICES, Device, Measured, device
from etude.plan.planning import Memory, Plan, critical_batch, engine_remedies, learner_remedies, plan
from etude.plan.shape import Layout, Region, Shape, Training

__all__ = [
    "DEVICES",
    "Device",
    "Layout",
    "Measured",
    "Memory",
    "Plan",
    "Region",
    "Shape",
    "Training",
    "critical_batch",
    "device",
    "engine_remedies",
    "learner_remedies",
    "plan",
    "sensitivity",
]
