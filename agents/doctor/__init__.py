"""Checks a node, a user's limits and a job's environment (``ringtap doctor``)."""
