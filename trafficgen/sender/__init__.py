"""Sends a flow plan: launcher, workers and their connections."""
