"""The report of a sweep or of a table of iteration times: one page, figures, data."""
