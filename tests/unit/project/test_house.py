"""The docstring of a module begins with a verb."""

import pytest

from scripts.house import VERBS, begins_with_verb

pytestmark = pytest.mark.computes


@pytest.mark.parametrize("text", ["Reads captures.", "Tells, step by step, which steps end.", "Reports the packets."])
def test_a_verb_is_known(text: str) -> None:
    assert begins_with_verb(text)


@pytest.mark.parametrize("text", ["Layout of a testbed.", "Reports of sweeps.", "``ringtap run``", "Read.", ""])
def test_all_else_is_told_apart(text: str) -> None:
    assert not begins_with_verb(text)


def test_the_verbs_are_in_order() -> None:
    assert list(VERBS) == sorted(set(VERBS))
