"""What a running job does now: `paceline top`, the page of `--dashboard`, and its metrics for Prometheus.

Not public. Reads what ranks record (`paceline.tracing`); no rank and no launcher imports it. Imports tracing,
errors and the standard library; rich, when `paceline top` draws.
"""
