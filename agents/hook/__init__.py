"""Makes a job's processes load the recorder without edits to their code: this folder stands on the job's PYTHONPATH."""
