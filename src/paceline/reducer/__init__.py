"""From parameters to averaged gradients, without any framework.

What lives here: the plan (parameters -> arena and buckets, pure), the agreement check of a wrapped model,
the state machine of one backward pass over any asynchronous all-reduce, and the texts of the errors that
a pass can end in. May import `errors` and `rendezvous`; never a front end.
"""
