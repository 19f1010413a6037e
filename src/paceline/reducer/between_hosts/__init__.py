"""Between hosts: each host sums its own ranks' gradients, and only the sums go from host to host.

`hierarchical` is a reducer as others are, and hands each rank's shard of a bucket to `exchange`. A bucket in
flight (`sum_messages`, `value_messages`) is laid out over `routes`, adds up by `blocks`, and travels as
`wire` says, in one of the formats of `compressed_sums`. The front ends have the transports; `piped_transport`
is for process groups whose calls block.

Words
  shard    the part of each bucket that one rank of a host sums and exchanges with its *peers*, the ranks
           with the same local rank on the other hosts. There are as many as the smallest host has ranks;
           further ranks of a larger host have none
  block    neighbouring ranks of one host whose sum goes to the other hosts. Each host is one, unless the
           sums have to be those of one host and this layout would add up in another order
  part     of a shard, what one host sums for all, where there are two rounds
  piece    of a shard or a part, what one message holds
  round    one step of an exchange; every host sends to every other in each

Routes of a shard of S bytes between H hosts of B blocks each
  one round   for two hosts of one block, and where it sends little more: every rank's shard to every rank.
              B * (H - 1) * S sent, one latency.
  two rounds  otherwise: each part to its owner, who adds the sums up, then the sum to every rank.
              (B + 1) * (H - 1) / H * S sent, for one block the least that there is, and two latencies.
              Two hosts with B and C blocks have parts with which both send the same: (B * C - 1) /
              (B + C - 2) * S.
Both add up in the same order, so both give the same bits.

What travels is sums, each behind a header in a message of its own (`sum_messages`). Between hosts of one rank
each it is that rank's gradients as they are, from the memory in which they lie, where there are many of them
(`value_messages`): in two rounds, with few headers.

Not public.
"""
