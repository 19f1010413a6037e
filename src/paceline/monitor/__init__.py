"""What a running job does now: `paceline top`, the page of `--dashboard`, and its metrics for Prometheus.

Not public. Reads what ranks record (`paceline.trace`); no rank and no launcher imports it.
"""
