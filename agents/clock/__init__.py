"""Clock offsets between the nodes of a run."""
