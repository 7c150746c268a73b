"""The ``ringtap traffic`` verbs, one module per verb."""
