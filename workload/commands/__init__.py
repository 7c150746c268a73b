"""Implements the verbs of ``ringtap workload``, and ``ringtap schedule`` and ``whatif``."""
