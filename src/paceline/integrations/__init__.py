"""Paceline in the trainers that people use: one file for each library, imported by those who use it.

Nothing else in Paceline imports this folder, and a file of it imports its library, the front end and
`versions`, but no neighbour. Each is an optional extra: importing `paceline.integrations.lightning` needs
Lightning. docs/trainers.md says what to write, and what was tried.

Not public.
"""
