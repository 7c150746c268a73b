"""Runs compared: measures of each, tests of their differences, and a page."""
