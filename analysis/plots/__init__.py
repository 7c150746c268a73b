"""Figures: their style, and one module per kind of figure."""
