"""The placement of memory on a machine with two NUMA nodes, which `make numa` simulates."""
