"""Several hosts on one machine: network namespaces joined by links of a given rate. Needs root.

`python -m tests.hosts` (`make hosts`) measures training steps in them beside torch's DDP; the tests here
check results and count the bytes that cross the links. Tests that need no real link are in
`tests/multiprocess/test_hosts.py`.
"""
