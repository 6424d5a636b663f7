"""Assignment of subjects to the versions of a release, for any subjects and shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import InputError
from etude.releases import Arm, arm_of
from etude.releases.assignment import pseudonym

SALTS = st.binary(min_size=16, max_size=16)
SUBJECTS = st.text(min_size=1, max_size=100)


@given(SALTS, SUBJECTS, st.lists(st.integers(0, 100), min_size=2, max_size=6))
def test_a_growing_share_moves_no_subject_back(salt: bytes, subject: str, shares: list[int]) -> None:
    arms = [arm_of(salt, subject, share) for share in sorted(shares)]
    assert arms == sorted(arms, key=[Arm.STABLE, Arm.CANARY].index)
    assert arm_of(salt, subject, 0) is Arm.STABLE
    assert arm_of(salt, subject, 100) is Arm.CANARY


@given(SALTS, SUBJECTS, st.integers(0, 100))
def test_a_subject_always_gets_the_same_version(salt: bytes, subject: str, share: int) -> None:
    assert arm_of(salt, subject, share) is arm_of(bytes(salt), str(subject), share)


@pytest.mark.parametrize("share", [1, 5, 25])
def test_a_share_is_that_of_the_subjects_and_independent_of_the_last_release(share: int) -> None:
    one, other = b"a" * 16, b"b" * 16
    subjects = [f"user-{i}@example.org" for i in range(40_000)]
    first = [s for s in subjects if arm_of(one, s, share) is Arm.CANARY]
    error = 5 * (share / 100 * (1 - share / 100) / len(subjects)) ** 0.5
    assert abs(len(first) / len(subjects) - share / 100) < error
    again = sum(arm_of(other, s, share) is Arm.CANARY for s in first) / len(first)
    assert abs(again - share / 100) < 5 * (share / 100 / len(first)) ** 0.5


@given(SALTS, SUBJECTS, SUBJECTS)
def test_a_pseudonym_is_equal_for_one_subject_only_and_has_no_part_of_its_name(salt: bytes, a: str, b: str) -> None:
    assert (pseudonym(salt, a) == pseudonym(salt, b)) == (a == b)
    assert len(pseudonym(salt, a)) == 16


@pytest.mark.parametrize("subject", ["", "x" * 1025, "ä" * 513])
def test_a_subject_that_names_nobody_is_refused(subject: str) -> None:
    with pytest.raises(InputError, match="cannot be assigned"):
        arm_of(b"a" * 16, subject, 5)
