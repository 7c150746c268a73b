"""Runs the agent of a node, which records for all ranks of a job there."""
