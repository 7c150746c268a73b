"""The agent: one per node, however many ranks of a job it has."""
