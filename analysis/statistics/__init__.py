"""Statistics of iteration times: quantiles, tests of two samples, effective sample sizes."""
