"""From parameters to averaged gradients, without any framework.

What lives here: the plan (parameters -> arena and buckets, pure), the agreement check of a wrapped model,
the reducers over shared memory and over any asynchronous all-reduce, what a front end remembers of a pass,
and the errors that a pass can end in. May import `collectives`, the core and what is below; no front end.

Not public.
"""
