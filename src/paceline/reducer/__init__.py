"""From parameters to averaged gradients, without any framework.

Files: the plan (parameters -> gradient buffer and buckets, pure), the agreement check of a wrapped model, the
reducer over any asynchronous all-reduce, the communicators, what all of Paceline asks of a framework
(`framework_ops`), and the errors that a backward can end in.
Folders, which use these: `backward` runs one backward pass, `between_hosts` is the reducer over several
hosts, and `local_sgd` lets replicas train on their own for some steps.

Not public.
"""
