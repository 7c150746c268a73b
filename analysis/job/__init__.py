"""Analyzes a recorded job and its network, iteration by iteration."""
