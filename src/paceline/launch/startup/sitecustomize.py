"""Watches for imports of torch and Paddle in ranks of `paceline run --replace-ddp`, and in their children.

Python imports a module of this name at start-up. The launcher puts this folder on the PYTHONPATH of these
ranks; no other process finds it.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

try:
    from paceline.import_hook import import_front_end, watch_imports
except ImportError:  # a rank has started another Python, which does not have Paceline
    pass
else:
    watch_imports(import_front_end)

# Run the environment's own sitecustomize, which this module hides, and restore sys.path.
_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
_spec = PathFinder.find_spec(__name__)
if _spec is not None and _spec.loader is not None:
    _module = sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(_module)
