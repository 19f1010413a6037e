"""Draws docs/pictures/notebook.png: the cells of docs/notebook.md, run in a real kernel, in a real browser.

Run it when the page changes: python -m tests.notebook_picture. It needs chromium, and `pip install nbconvert
ipykernel pillow`. It prints the output of the ranks, for the page.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from PIL import Image

from tests.browser import Browser

DOCS = Path(__file__).parents[1] / "docs"
_CELLS = 3  # of the page: the last of them calls spawn


def main() -> None:
    """Write the picture."""
    cells = re.findall(r"^```python\n(.*?)^```$", (DOCS / "notebook.md").read_text(), re.M | re.S)[:_CELLS]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell.rstrip()) for cell in cells],
            metadata={
                "title": "paceline",
                "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            },
        )
        nbformat.write(notebook, folder / "train.ipynb")
        command = [sys.executable, "-m", "nbconvert", "--to", "html", "--execute", "train.ipynb"]
        subprocess.run(command, cwd=folder, check=True, timeout=600)
        browser = Browser(folder / "profile")
        try:
            browser.open((folder / "train.html").as_uri(), 900, 200)
            browser.until("document.querySelectorAll('.jp-OutputArea-output').length > 0")
            outputs = "[...document.querySelectorAll('.jp-OutputArea-output')].map(each => each.innerText)"
            print(browser.evaluate(f"{outputs}.join('\\n')"))
            shot = browser.screenshot()
        finally:
            browser.close()
    Image.open(io.BytesIO(shot)).convert("RGB").quantize(64).save(
        DOCS / "pictures" / "notebook.png", optimize=True
    )


if __name__ == "__main__":
    main()
