"""Who is alive, late or dead during training, and why.

`peer_monitor` is what the rest asks: over the memory of a host, or over the `control_channel` between hosts.
`lifetime` reports that this rank raises or exits. Not public.
"""
