"""Call the learner's plug-ins, policy loss and correction, and check their results.

An exception, a result with a wrong type, shape or value, or no result within `CALL_S` is a `PluginError` that names
the plug-in. Plug-ins are not called on a rank without sampled tokens: its loss is 0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from etude.config import Plugin
from etude.plugins import Kind, bounded, identity, make, unusable
from etude.training.config import LearnerConfig
from etude.training.corrections import Corrected, Correction
from etude.training.losses import PolicyLoss, PolicyLossFunction, SampledTokens

CALL_S = 120.0
"""Deadline of one call of a plug-in, in seconds. The first call may compile kernels."""


class LearnerPlugins:
    """The plug-ins of a learner, each constructed once."""

    def __init__(self) -> None:
        self._loaded: list[tuple[Plugin, Any]] = []

    def get(self, kind: Kind, plugin: Plugin) -> Any:
        """Return the object of the plug-in. The first call constructs it.

        Raises `PluginRefused`, `ConfigError` or `PluginError` when it cannot be loaded or constructed."""
        for known, made in self._loaded:
            if known == plugin:
                return made
        self._loaded.append((plugin, make(kind, plugin)))
        return self._loaded[-1][1]

    def load(self, config: LearnerConfig) -> None:
        """Construct the plug-ins of the learner's settings."""
        for kind, plugin in named_plugins(config).items():
            self.get(kind, plugin)

    def loss(self, plugin: Plugin, tokens: SampledTokens) -> PolicyLoss:
        """Compute the policy loss of a plug-in for the sampled tokens of one forward pass.

        If there are none, return a loss of 0 without calling the plug-in. Raises the errors of `call_loss`."""
        empty_R = tokens.logprobs_R.detach()
        if not len(empty_R):
            return PolicyLoss(tokens.logprobs_R.sum(), empty_R, empty_R.bool())
        return call_loss(plugin, self.get(Kind.LOSS, plugin), tokens)

    def corrected(self, plugin: Plugin, log_ratio_R: torch.Tensor, sequence_R: torch.Tensor) -> Corrected:
        """Compute the importance weights [R] of a plug-in for R sampled tokens, with the arguments of `Correction`.

        If R is 0, return empty weights without calling the plug-in. Raises the errors of `call_correction`."""
        if not len(log_ratio_R):
            return Corrected(log_ratio_R, log_ratio_R)
        return call_correction(plugin, self.get(Kind.CORRECTION, plugin), log_ratio_R, sequence_R)


def call_loss(plugin: Plugin, function: PolicyLossFunction, tokens: SampledTokens) -> PolicyLoss:
    """Call the policy loss `function` and check its result. `plugin`: its setting, which the error names.

    Raises `PluginError` if the call raises or hangs, or if the result is not a `PolicyLoss` with a finite scalar `loss`
    that has a gradient, and detached `ratio_R` (float, not NaN) and `clipped_R` (bool), both [R] for R sampled
    tokens."""
    done = _call(Kind.LOSS, plugin, "computing the loss", lambda: function(tokens), tokens.logprobs_R.device)
    if not isinstance(done, PolicyLoss):
        facts = f"it is {type(done).__name__}, and etude.training.losses.PolicyLoss is expected"
        raise unusable(Kind.LOSS, plugin, facts)
    _check(Kind.LOSS, plugin, "loss", done.loss, like=tokens.logprobs_R.sum(), grad=True)
    _check(Kind.LOSS, plugin, "ratio_R", done.ratio_R, like=tokens.logprobs_R)
    _check(Kind.LOSS, plugin, "clipped_R", done.clipped_R, like=tokens.logprobs_R.bool())
    return done


def call_correction(
    plugin: Plugin, correction: Correction, log_ratio_R: torch.Tensor, sequence_R: torch.Tensor
) -> Corrected:
    """Call `correction` and check its result. `plugin`: its setting, which the error names.

    Raises `PluginError` if the call raises or hangs, or if the result is not a `Corrected` with detached float tensors
    [R] that contain no NaN, or if a `weight_R` is negative."""
    work, device = lambda: correction(log_ratio_R, sequence_R), log_ratio_R.device
    done = _call(Kind.CORRECTION, plugin, "computing the weights", work, device)
    if not isinstance(done, Corrected):
        facts = f"it is {type(done).__name__}, and etude.training.corrections.Corrected is expected"
        raise unusable(Kind.CORRECTION, plugin, facts)
    for name in ("weight_R", "uncut_R"):
        _check(Kind.CORRECTION, plugin, name, getattr(done, name), like=log_ratio_R)
    if bool((done.weight_R < 0).any()):
        raise unusable(Kind.CORRECTION, plugin, f"the least of weight_R is {float(done.weight_R.min()):.4g}, below 0")
    return done


def _call(kind: Kind, plugin: Plugin, doing: str, work: Callable[[], object], device: torch.device) -> object:
    """Call a function of a plug-in in a thread of its own, whose current device is `device`, and return its result.

    Raises `PluginError` if it raises, or has not returned after `CALL_S` seconds."""

    def on_device() -> object:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return work()

    return bounded(kind, plugin, doing, on_device, deadline_s=CALL_S)


def named_plugins(config: LearnerConfig) -> dict[Kind, Plugin]:
    """Return the plug-ins in a learner's settings, by kind."""
    named = {Kind.LOSS: config.policy_loss, Kind.CORRECTION: config.correction}
    return {kind: value for kind, value in named.items() if isinstance(value, Plugin)}


def plugin_identities(config: LearnerConfig) -> Mapping[str, str]:
    """Return package, version and source digest of the plug-ins in a learner's settings, by kind."""
    return {str(kind): str(identity(kind, plugin.path)) for kind, plugin in named_plugins(config).items()}


def _check(kind: Kind, plugin: Plugin, name: str, value: object, *, like: torch.Tensor, grad: bool = False) -> None:
    """Raise `PluginError` unless `value` is a tensor with the shape, device and kind of dtype of `like`.

    With `grad` it must have a gradient (the loss); otherwise it must not. A ratio that overflows is reported by
    `nan_check.check_loss`, which says what to do."""
    expected = f"a tensor {list(like.shape)} of {'bool' if like.dtype is torch.bool else 'float'} on {like.device}"
    if not isinstance(value, torch.Tensor):
        raise unusable(kind, plugin, f"{name} is {type(value).__name__}, and {expected} is expected")
    fits = value.shape == like.shape and value.device == like.device
    if not fits or value.is_floating_point() != like.is_floating_point():
        facts = f"{name} is a tensor {list(value.shape)} of {value.dtype} on {value.device}, and {expected} is expected"
        raise unusable(kind, plugin, facts)
    if value.requires_grad != grad:
        facts = "has no gradient: compute it from tokens.logprobs_R" if grad else "has a gradient: detach it"
        raise unusable(kind, plugin, f"{name} {facts}")
    if value.is_floating_point() and bool(torch.isnan(value).any() if not grad else not torch.isfinite(value)):
        raise unusable(kind, plugin, f"{name} is {'NaN' if bool(torch.isnan(value).any()) else 'infinite'}")
