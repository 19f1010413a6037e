"""How good the answers of `paceline tune` are: `python -m tests.tuning` measures all layouts for long."""
