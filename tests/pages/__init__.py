"""Pages that a reader follows: tutorials, and a notebook."""
