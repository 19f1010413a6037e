"""`python -m paceline` is the `paceline` command."""

from __future__ import annotations

import sys

from paceline.cli import main

sys.exit(main())
