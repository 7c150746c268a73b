"""Calculates statistics of iteration times: quantiles, comparison of two samples, effective sample sizes."""
