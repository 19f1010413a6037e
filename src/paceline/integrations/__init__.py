"""Integrations of Paceline into trainer libraries, with one file for each library.

Nothing else in Paceline imports this folder. A file imports its library, the front end and `versions`, but no
other integration. Each is optional: importing `paceline.integrations.lightning` needs Lightning.
docs/trainers.md shows how to use them, and what was tested.

Not public. Import the module of your library.
"""
