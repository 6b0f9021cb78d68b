"""Metrics that a run computes when its setting `metric` names them, one file each.

Those that every run has are in `core/metrics.py`. A metric is a function of probabilities, (rows,
classes), of the true classes y, (rows,), as numbers, and of the names of the classes; it returns
one number, or NaN where it is not defined. Larger is better, unless the function has an attribute
`lower_is_better`. It is called for each client's rows, and for all clients' rows together.
"""
