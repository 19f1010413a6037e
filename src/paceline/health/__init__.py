"""Detects dead and late ranks during training, and reports why a rank failed. Not public.

The rest of Paceline asks `peer_monitor`, which works over the shared memory of one host or over the
`control_channel` between hosts. `exit_reports` reports to the other ranks that this one raises or exits.
"""
