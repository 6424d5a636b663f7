"""The cache of a runtime's snapshots: within its limit, except for snapshots in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.environments.lru_cache import LruCache
from etude.errors import MachineError

STEPS = st.lists(st.tuples(st.sampled_from(["put", "hold", "release", "get"]), st.integers(0, 9)), max_size=60)


@given(STEPS)
def test_entries_in_use_stay_and_the_rest_keeps_within_the_limit(steps):
    kept, held = LruCache[bytes](len, max_bytes=12), dict.fromkeys(range(10), 0)
    for what, number in steps:
        name, thing = str(number), bytes(number)
        if what == "put":
            assert kept.put(name, thing) == name
        elif what == "get":
            assert kept.get(name) in (None, thing)
        elif what == "hold" and kept.get(name) is None:
            with pytest.raises(MachineError, match="no snapshot"):
                kept.hold(name)
        elif what == "hold":
            assert kept.hold(name) == number
            held[number] += 1
        elif held[number]:
            kept.release(name)
            held[number] -= 1
        there = [n for n in held if str(n) in kept._entries]
        assert all(kept.get(str(n)) == bytes(n) for n in held if held[n])
        passing = [n for n in there if not held[n]]
        assert sum(passing) <= 12 or len(passing) == 1
        assert kept._evictable_bytes == sum(passing)
