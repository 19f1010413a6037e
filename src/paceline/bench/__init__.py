"""`paceline bench`: Paceline and what people use today, measured side by side on this machine.

Each contender (Paceline, Gloo, Open MPI, torch DDP) is a job: its own processes, one per rank. The conductor
holds a socket to each of them, lets one job at a time run one sample, and goes round: A B C A B C. So a
noisy neighbour hits all alike, and a contender that fails or hangs takes only itself out of the table.
Every contender shows that its answer is right before it is timed.

The bench stands above all layers but the front ends, because it measures them. What runs in the user's own
process needs nothing of Paceline but its errors; the programs of the workers import what they
measure, and those that need torch live in `paceline.torch.bench`, known here by name only.

Not public.
"""
