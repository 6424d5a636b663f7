"""The contract suite of drafters for speculative decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from etude.testing.contracts import Contract

SLOTS, MOST = 6, 16


class DrafterContract(Contract):
    """Contract suite for drafters: tests what an engine needs of an `etude.inference.look_up.Drafter`.

    Which tokens a drafter proposes is not tested: a wrong draft costs time, and never changes a token."""

    def drafted(self, drafter: Any, slot: int, most: int) -> Sequence[int]:
        """Return the drafts for a slot, after a check of their number and type."""
        found: Sequence[int] = drafter.draft(slot, most)
        assert len(found) <= most, f"draft returned {len(found)} tokens, at most {most} were asked for"
        for token in found:
            is_id = not isinstance(token, bool) and hasattr(token, "__index__") and token >= 0
            assert is_id, f"draft returned {token!r}, which is no token id"
        return found

    def test_drafts_are_token_ids_and_no_more_than_asked_for(self) -> None:
        drafter = self.make()
        drafter.begin(0, [1, 2, 3, 4] * 8)
        for most in (1, 2, MOST):
            self.drafted(drafter, 0, most)

    def test_a_prompt_may_be_short_and_an_extension_empty(self) -> None:
        drafter = self.make()
        for prompt in ([5], [5, 6], [5, 6, 7]):
            drafter.begin(0, prompt)
            self.drafted(drafter, 0, MOST)
            drafter.extend(0, [])
            self.drafted(drafter, 0, 1)

    def test_slots_are_used_in_any_order_and_again_for_other_sequences(self) -> None:
        drafter, rng = self.make(), random.Random(1)
        running: dict[int, list[int]] = {}
        for _ in range(400):
            slot = rng.randrange(SLOTS)
            if slot not in running or rng.random() < 0.1:
                running[slot] = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
                drafter.begin(slot, running[slot])
            else:
                more = [rng.randrange(4) for _ in range(rng.randrange(4))]
                running[slot] += more
                drafter.extend(slot, more)
            if rng.random() < 0.5:
                self.drafted(drafter, slot, rng.randrange(1, MOST + 1))

    def test_a_slot_may_go_on_with_the_next_turn_of_its_conversation(self) -> None:
        drafter, turn = self.make(), [1, 2, 3, 4, 5, 1, 2, 3]
        drafter.begin(3, turn)
        drafter.extend(3, [4, 5])
        drafter.begin(3, [*turn, 4, 5, 6, 7])
        self.drafted(drafter, 3, MOST)
        drafter.begin(3, turn[:4])  # the same request, started again
        self.drafted(drafter, 3, MOST)

    def test_the_tokens_are_not_changed(self) -> None:
        drafter, prompt, more = self.make(), [1, 2, 3, 4, 1, 2, 3], [4, 1]
        drafter.begin(0, prompt)
        drafter.extend(0, more)
        found = self.drafted(drafter, 0, MOST)
        drafter.extend(0, [2])
        assert (prompt, more) == ([1, 2, 3, 4, 1, 2, 3], [4, 1]), "begin or extend changed its argument"
        assert len(found) <= MOST, "a returned draft has grown"

    def test_token_ids_and_sequences_may_be_large(self) -> None:
        drafter = self.make()
        drafter.begin(4095, [i * 7919 % 262_144 for i in range(20_000)])
        self.drafted(drafter, 4095, MOST)
