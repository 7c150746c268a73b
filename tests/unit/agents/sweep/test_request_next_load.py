"""The process that chooses loads: it answers, and a sweep does not wait for ever for one that hangs or has ended."""

import os
import signal
from pathlib import Path

import pytest

from ringtap.agents.sweep import request_next_load
from ringtap.agents.sweep.request_next_load import LoadChoice
from ringtap.core.errors import MeasurementError

pytestmark = pytest.mark.shares

ENDS_NS = [step * 10**8 for step in range(20)]


def test_a_process_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_next_load, "_ASKED_EVERY_S", 0.0)
    with LoadChoice(tmp_path, 0.05) as choice:
        assert choice.is_known(ENDS_NS)
        os.kill(choice._process.pid, signal.SIGSTOP)
        monkeypatch.setattr(request_next_load, "_ANSWER_S", 0.5)
        with pytest.raises(MeasurementError, match=r"gave no answer for 0\.5 s: .*next-load\.log"):
            choice.is_known(ENDS_NS)


def test_a_process_that_has_ended_is_reported(tmp_path: Path) -> None:
    with LoadChoice(tmp_path, 0.05) as choice:
        os.kill(choice._process.pid, signal.SIGKILL)
        choice._process.wait()
        with pytest.raises(MeasurementError, match="has ended"):
            choice.is_known(ENDS_NS)
