"""Checks the answers of `paceline tune`: `python -m tests.tuning` measures all layouts for long."""
