"""Receives cross traffic: its worker processes and their connections."""
