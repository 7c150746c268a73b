"""Checks of what a node, a user and a job environment allow."""
