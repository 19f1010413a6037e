"""Each library of `paceline.integrations`, used as its users do: `make integrations` runs these.

Not part of `make test`: they need libraries that no other test needs. A missing library is a failure.
"""
