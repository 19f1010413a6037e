"""Each library of `paceline.integrations` as its users have it: `make integrations` runs these.

Not part of `make test`: they need libraries that nothing else needs. A library that is missing is a failure.
"""
