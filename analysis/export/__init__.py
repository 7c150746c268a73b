"""Exports a run for other programs: its tables as files and databases, traces, and event logs."""
