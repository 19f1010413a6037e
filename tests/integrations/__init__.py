"""Tests of trainers and other libraries as their users use them with Paceline: `make integrations`.

They are not part of `make test`, because no other test needs these libraries. A missing library is a failure.
"""
