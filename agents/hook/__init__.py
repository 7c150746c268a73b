"""Folder for a job's PYTHONPATH, from which the job's processes load the recorder without edits to their code."""
