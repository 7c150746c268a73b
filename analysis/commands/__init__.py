"""Analysis verbs of the command line, one module per verb; ``fit`` and ``demand`` share a module."""
