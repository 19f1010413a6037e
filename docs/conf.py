"""Sphinx's configuration. `make docs` builds with warnings as errors."""

from importlib.metadata import version as version_of
from importlib.util import find_spec

project = "Paceline"
author = "The Paceline authors"
copyright = "The Paceline authors"
version = release = version_of("paceline")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
default_role = "literal"  # single backticks, as in the docstrings
highlight_language = "text"  # what a command prints; other blocks name their language
html_theme = "furo"
html_title = "Paceline"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The framework-free part is documented without torch; the front end needs something to inherit from.
autodoc_mock_imports = [] if find_spec("torch") else ["torch"]


def without_tests(app, docname, source):
    """Leave out the column that names a test for each row: it is for those who read the source."""
    if docname not in ("coming-from-ddp", "coming-from-paddle"):
        return
    lines = source[0].split("\n")
    is_within = False
    for number, line in enumerate(lines):
        cells = line.split("|")
        is_within = line.startswith("|") and (is_within or cells[-2].strip() == "test")
        if is_within:
            lines[number] = "|".join([*cells[:-2], ""])
    source[0] = "\n".join(lines)


def setup(app):
    app.connect("source-read", without_tests)
