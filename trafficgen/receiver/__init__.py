"""The receiver of cross traffic."""
