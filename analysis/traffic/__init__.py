"""Compares cross traffic as it was planned, sent and captured."""
