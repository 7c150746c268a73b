"""The folder put on a job's PYTHONPATH so that its steps are recorded without an edit."""
