"""Analysis of a job and its network per iteration."""
