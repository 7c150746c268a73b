"""Training jobs, plans and data that ship with ringtap, and the build of Horovod; the jobs know nothing of ringtap."""
