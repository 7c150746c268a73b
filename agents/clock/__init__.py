"""Measures the clock offsets between the nodes of a run."""
