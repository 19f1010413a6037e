"""Sums between hosts: each host sums its own ranks' gradients, and only the sums go from host to host.

`hierarchical` is the reducer, and hands each rank's shard of a bucket to `exchange`. `routes` says how a
shard travels between the hosts, and `host_sum_order` in which order sums are added. `sum_messages` and
`value_messages` are the two kinds of in-flight buckets, in messages that `message_headers` defines, with sums
in a format of `compressed_sums`. Front ends have the transports; `piped_transport` is for blocking process
groups.

Words
  shard    the part of each bucket that one rank of a host sums and exchanges with its *peers*, the ranks
           with the same local rank on the other hosts. There are as many as the smallest host has ranks;
           further ranks of a larger host have none
  block    neighbouring ranks of one host whose sum goes to the other hosts. Each host is one block, unless
           the sums must have the bits of one host and whole hosts would be added in another order
  part     the range of a shard that one host sums for all hosts, if there are two rounds
  piece    the range of a shard or a part that one message holds
  round    one step of an exchange; in each, every host sends to every other host

Routes of a shard of S bytes between H hosts of B blocks each
  one round   for two hosts of one block, and if it sends only a little more: every rank sends its shard to
              all its peers. B * (H - 1) * S bytes sent, one latency.
  two rounds  otherwise: each part goes to its owner, which adds the sums up and sends the result to every
              peer. (B + 1) * (H - 1) / H * S bytes sent, which for one block is the minimum, two latencies.
              Two hosts with B and C blocks have parts with which both send the same: (B * C - 1) /
              (B + C - 2) * S.
Both add up in the same order, so both give the same bits.

Messages carry sums, each behind a header in a message of its own (`sum_messages`). Between hosts with one
rank each, larger buckets and those of 16 bits carry that rank's gradients instead (`value_messages`). Large
ones go directly from the gradient buffer, in two rounds and with few headers.

Not public.
"""
