"""`python -m tests.tuning` checks the answers of `paceline tune` with long measurements of all layouts."""
