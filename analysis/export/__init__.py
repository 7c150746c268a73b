"""Exports of a run for other programs: its tables as files, databases and event logs."""
