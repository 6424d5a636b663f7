"""A served scripted policy, and the clients of the vendors, for the tests of the dialects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anthropic
import openai
from tests.unit.harness.test_checkpoint_chat import qwen_chat

from etude.gateway import GatewayConfig, Keys, ServedModel, create_app, serving
from etude.gateway.app import Gateway
from etude.harness import ChatFormat
from etude.testing import ScriptedEngine, StreamingPolicy
