"""Live view of a run directory that is being written."""
