"""The standard streams of a process: some may have been closed by its caller (``<&-``), or cannot be written."""

from __future__ import annotations

import os
import sys


def fill_standard_descriptors() -> None:
    """Open the null device in place of closed standard descriptors; call it first in every program.

    A file or socket opened later would take their numbers, and be read, written or closed as a standard stream. What
    is opened here is not inherited: a wrapped job finds closed what its caller has closed.
    """
    try:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    except OSError:  # no descriptor left: then none of the three is free
        return
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # print() takes such a standard error for standard output
            stream = open(number, "w" if number else "r", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def discard_output() -> None:
    """Redirect standard output to the null device, once a write to it has failed."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
