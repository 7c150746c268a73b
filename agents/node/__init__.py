"""The agent: one a node, however many ranks of a job it has."""
