"""Analyzes run directories and packet captures: iteration times, congestion points, fits and reports."""
