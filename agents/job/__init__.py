"""Runs a job: its supervisor, its signals and the connection to the node's agent."""
