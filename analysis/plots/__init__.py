"""Draws figures: the style, and one module per kind of figure."""
