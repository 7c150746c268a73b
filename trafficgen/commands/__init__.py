"""Implements the verbs of ``ringtap traffic``, one module per verb."""
