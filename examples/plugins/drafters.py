"""A drafter: what most often followed the last token, counted over all sequences of an engine."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Bigrams:
    """Drafts the most frequent follower of each token, if it was seen at least `least` times."""

    least: int = 2
    _followers: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter), init=False)
    _last: dict[int, int] = field(default_factory=dict, init=False)  # token of each slot

    def begin(self, slot: int, token_ids: Sequence[int]) -> None:
        self._last.pop(slot, None)
        self.extend(slot, token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        before = [self._last[slot]] if slot in self._last else []
        for token, follower in pairwise([*before, *token_ids]):
            self._followers[token][follower] += 1
        if token_ids:
            self._last[slot] = token_ids[-1]

    def draft(self, slot: int, most: int) -> list[int]:
        found: list[int] = []
        token = self._last[slot]
        while len(found) < most and (followers := self._followers.get(token)):
            token, count = max(followers.items(), key=lambda item: item[1])
            if count < self.least:
                break
            found.append(token)
        return found
