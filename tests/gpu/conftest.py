"""Where there is no GPU, Triton's interpreter runs the programs on the CPU: decided before anything imports them."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
