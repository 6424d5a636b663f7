"""Metrics of one training batch, accumulated over its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from etude.models.transformer import Forward
from etude.records.sample import StepReport
from etude.training.corrections import Corrected, effective_share
from etude.training.flat_batch import FlatBatch
from etude.training.losses import PolicyLoss, k1, k3


@dataclass
class BatchMetrics:
    """Sums of the metrics of one batch over its forward passes. `report` returns the result.

    - `num_tokens`: tokens of all paths (a path is the token sequence of one sample). `num_forwarded`: tokens that the
      model computed; a token that several paths share counts once.
    - `balance`: the load-balancing loss, summed with each pass's `num_tokens` as weight.
    - `num_routed`: (token, layer) pairs with replayed experts. `num_slots`: number of experts in these pairs.
      `num_replaced`: how many of these experts were implausible and replaced. `num_flipped`: number of pairs in which
      the router would have chosen other experts.
    - `num_replayed`: tokens with replayed experts.
    - `live`: log-ratios of a few tokens, computed without replay.
    - `fresh`: the largest |ratio - 1| of each forward pass over tokens that the current weights sampled."""

    num_tokens: int = 0
    num_forwarded: int = 0
    loss: float = 0.0
    balance: float = 0.0
    num_clipped: int = 0
    entropy: float = 0.0
    num_flipped: int = 0
    num_routed: int = 0
    num_replaced: int = 0
    num_slots: int = 0
    num_replayed: int = 0
    live: list[torch.Tensor] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    log_ratios: list[torch.Tensor] = field(default_factory=list)
    corrected: list[Corrected] = field(default_factory=list)

    def add(
        self,
        rows: FlatBatch,
        done: Forward,
        policy: PolicyLoss,
        corrected: Corrected,
        log_ratio_R: torch.Tensor,
        entropy_R: torch.Tensor,
        loss: torch.Tensor,
        fresh: float | None,
    ) -> None:
        """Add the metrics of one forward pass with R rows (tokens with loss).

        `rows`: the input of the pass. `done`: its results. `policy`, `corrected`: the loss and the importance weights.
        `log_ratio_R`: log-probability of the learner minus that of the sampler, [R]. `entropy_R`: in nats, [R]. `loss`:
        the scalar that was differentiated. `fresh`: the largest |ratio - 1| of tokens that the current weights sampled;
        None without such tokens."""
        n = rows.num_tokens
        if not n:  # forwarded only because other ranks wait for this one
            return
        self.num_tokens += n
        self.num_forwarded += rows.num_forwarded
        self.loss += float(loss)
        self.balance += n * float(done.balance) if done.balance is not None else 0.0
        self.num_clipped += int(policy.clipped_R.sum())
        self.entropy += float(entropy_R.sum())
        self.fresh += [] if fresh is None else [fresh]
        self.log_ratios.append(log_ratio_R.cpu())
        self.corrected.append(Corrected(corrected.weight_R.cpu(), corrected.uncut_R.cpu()))
        if rows.routes_NLK is not None:
            self._count_routes(rows.by_path(rows.routes_NLK), rows.by_path(done.routes), rows.by_path(done.live))

    def _count_routes(self, routes_PLK: torch.Tensor, used_PLK: torch.Tensor, live_PLK: torch.Tensor) -> None:
        known_P = routes_PLK[:, 0, 0].long() != torch.iinfo(routes_PLK.dtype).max
        routes, used, live = (each.long()[known_P] for each in (routes_PLK, used_PLK, live_PLK))  # no uint16 sorts
        self.num_flipped += int((routes.sort(-1).values != live.sort(-1).values).any(-1).sum())
        self.num_routed += routes.shape[0] * routes.shape[1]
        self.num_replaced += int((routes != used).sum())
        self.num_slots += routes.numel()
        self.num_replayed += len(routes)

    def report(self, *, cpu_s: float, num_unique: int | None = None) -> StepReport:
        """Return the metrics of the batch. A batch without samples has a loss of 0 and ratios of 1.

        `cpu_s`: CPU time of the batch in seconds. `num_unique`: tokens of the batch when a token that paths share
        counts once; None: no tokens are shared."""
        log_ratio = torch.cat(self.log_ratios) if self.log_ratios else torch.zeros(1)
        off = torch.expm1(log_ratio).abs()
        live = torch.cat(self.live) if self.live else torch.zeros(0)
        num_sampled = sum(len(x) for x in self.log_ratios)
        weight = torch.cat([c.weight_R for c in self.corrected]) if self.corrected else torch.ones(1)
        uncut = torch.cat([c.uncut_R for c in self.corrected]) if self.corrected else weight
        return StepReport(
            num_tokens=self.num_tokens,
            num_sampled=num_sampled,
            num_forwarded=self.num_forwarded,
            forwarded_per_unique=self.num_forwarded / max(1, num_unique or self.num_tokens),
            loss=self.loss,
            entropy=self.entropy / max(1, num_sampled),
            clip_share=self.num_clipped / max(1, num_sampled),
            ratio_max=float(off.max()),
            ratio_p99=float(off.sort().values[int(0.99 * (len(off) - 1))]),
            k1=float(k1(log_ratio).mean()),
            k3=float(k3(log_ratio).mean()),
            fresh_ratio_max=max(self.fresh) if self.fresh else None,
            flipped_share=self.num_flipped / max(1, self.num_routed),
            replayed_share=self.num_replayed / max(1, self.num_tokens),
            replaced_share=self.num_replaced / max(1, self.num_slots),
            live_k3=float(k3(live).mean()) if self.live else None,
            live_ratio_max=float(torch.expm1(live).abs().max()) if self.live else None,
            balance_loss=self.balance / max(1, self.num_tokens),
            cpu_s=cpu_s,
            cut_share=1.0 - float(weight.double().sum() / uncut.double().sum()),
            dropped_share=float((weight == 0).double().mean()),
            effective_share=effective_share(weight),
        )


def merge_metrics(tallies: Sequence[BatchMetrics]) -> BatchMetrics:
    """Sum the metrics of the data-parallel parts of a batch, in the order of the parts."""
    merged = BatchMetrics()
    for one in tallies:
        for each in fields(BatchMetrics):
            setattr(merged, each.name, getattr(merged, each.name) + getattr(one, each.name))
    return merged
