"""Processes of a sender or receiver: an end with an error is noticed, however late it follows that of the pipe."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import pytest

from ringtap.core.errors import MeasurementError
from ringtap.trafficgen.worker_processes import WorkerProcesses

pytestmark = pytest.mark.shares


def ends_late(control: Connection) -> None:
    control.close()
    time.sleep(1)
    os._exit(3)


def test_a_process_that_ends_with_an_error_long_after_its_pipe_is_noticed() -> None:
    with WorkerProcesses() as processes:
        processes.start(lambda control: control.poll(None) and None)  # the other one goes on
        processes.start(ends_late)
        with pytest.raises(MeasurementError, match="ended unexpectedly with exit code 3"):
            processes.listen(10)
