"""The errors ringtap shows its user: one sentence each, with a documented exit code."""

from __future__ import annotations


class RingtapError(Exception):
    """A problem the user can act on; printed as one sentence, never as a traceback."""

    exit_code = 1


class UsageError(RingtapError):
    """Wrong arguments, a bad file, a missing tool or privilege: exit code 2."""

    exit_code = 2


class MeasurementError(RingtapError):
    """The job or the measurement failed: exit code 1."""

    exit_code = 1
