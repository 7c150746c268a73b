"""The join: what a job and its network did, iteration by iteration."""

from ringtap.analysis.job.run import Job, open_job

__all__ = ["Job", "open_job"]
