"""Training jobs and sweep plans that ship with ringtap; the jobs know nothing of ringtap."""
