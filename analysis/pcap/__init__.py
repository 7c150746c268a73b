"""Captures scanned at memory speed: conversations, rates, queue pairs."""
