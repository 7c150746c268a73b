"""The analysis verbs, one module per verb."""
