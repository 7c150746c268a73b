"""The verbs of ``ringtap workload``."""
