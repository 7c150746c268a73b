"""The program that sends signals to each process says that a case holds, and sees it where one does not."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.testbed.signal_cases import SCENARIOS, Box, Scenario, measure

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]


def test_a_killed_agent_leaves_the_job_alone() -> None:
    assert measure(SCENARIOS["run"], "agent", "KILL") == []


def test_a_job_that_ended_with_the_agent_is_seen() -> None:
    def begin(box: Box) -> dict[str, Callable[[], Any]]:
        return {"agent": SCENARIOS["run"].begin(box)["job"]}

    found = measure(Scenario(begin, ("agent",), has_job=True), "agent", "KILL")
    assert "the job did not end as it had to" in found
