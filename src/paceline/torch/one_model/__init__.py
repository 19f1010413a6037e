"""One model per host: parameters that all ranks of a host read in the same memory.

What lives here: who holds which parameter (`homes`), how parameters move there (`moving`), what is refused
(`guards`), announced writes (`writing`), and `share()`. Imports the rooms below, and what is below the front
ends.

Not public.
"""
