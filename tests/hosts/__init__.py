"""Several hosts on one machine: network namespaces joined by links of a given rate. Needs root.

`python -m tests.hosts` (`make hosts`) measures training steps in them beside torch's DDP; the tests here
check answers and count what crosses the links. What needs no real link is in
`tests/multiprocess/test_hosts.py`.
"""
