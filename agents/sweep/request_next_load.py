"""Asks the analysis for a sweep's next loads, in a process of its own that reads the run directory."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from ringtap.core.errors import MeasurementError
from ringtap.core.isolated_python import python_command

_LOG = "log/next-load.log"
_MODULE = "ringtap.analysis.sweeps.next_load"
PACKAGES = ("numpy", "scipy", "pandas")
_LOWEST_PRIORITY = 19
_ASKED_EVERY_S = 1.0
_ANSWER_S = 300.0  # an answer takes seconds; at the lowest priority beside other programs, longer


class LoadChoice:
    """The process that chooses loads; a context manager. It runs at the lowest priority and on one core.

    Args:
        run: the sweep's run directory.
        target_mean: standard error at which the mean of a window is known well enough, as a share of it.
    """

    def __init__(self, run: Path, target_mean: float) -> None:
        self._run, self._target = run, target_mean
        self._asked_s = 0.0

    def __enter__(self) -> LoadChoice:
        log = self._run / _LOG
        log.parent.mkdir(exist_ok=True)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                python_command(sys.executable, _MODULE, str(self._run)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | threads,
                start_new_session=True,
            )
        psutil.Process(self._process.pid).nice(_LOWEST_PRIORITY)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def next_load(self, series: str) -> tuple[float | None, str, str]:
        """Return the next load of a series, what is known so far, and the reason to stop if there is no load.

        Raises:
            MeasurementError: the process failed.
        """
        answer = self._ask({"series": series})
        return answer["load"], answer["known"], answer["stop"]

    def is_known(self, ends_ns: Sequence[int]) -> bool:
        """Return True if the mean of the iterations between these ends is known well enough; asks once a second.

        Raises:
            MeasurementError: the process failed.
        """
        if time.monotonic() < self._asked_s + _ASKED_EVERY_S:
            return False
        times_s = [(after - before) / 1e9 for before, after in pairwise(ends_ns)]
        answer = self._ask({"iteration_s": times_s})
        self._asked_s = time.monotonic()
        return bool(answer["error"] <= self._target)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], _ANSWER_S)[0]:
                raise MeasurementError(
                    f"the process that chooses loads gave no answer for {_ANSWER_S:g} s: {self._run / _LOG} may say why"
                )
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise MeasurementError(f"the process that chooses loads has ended: {self._run / _LOG} says why")
        answer: dict[str, Any] = json.loads(line)
        if "problem" in answer:
            raise MeasurementError(f"the next load cannot be chosen: {answer['problem']}")
        return answer
