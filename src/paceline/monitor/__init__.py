"""Shows what a running job does: `paceline top`, the page of `--dashboard`, and metrics for Prometheus.

Not public. Reads what ranks record (`paceline.trace`). Neither ranks nor launchers import this folder.
"""
