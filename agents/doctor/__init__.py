"""Checks of a node, of a user's limits and of a job's environment (``ringtap doctor``)."""
