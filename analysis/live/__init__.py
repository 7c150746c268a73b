"""Shows a run directory while it is being written."""
