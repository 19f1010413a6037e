"""`python -m tests.device`: builds the devices of all frameworks that are installed."""

import importlib
import importlib.util

for framework in ("torch", "paddle"):
    if importlib.util.find_spec(framework) is not None:
        importlib.import_module(f"tests.device.{framework}").build()
