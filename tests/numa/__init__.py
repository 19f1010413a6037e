"""Where memory lies on a machine with two NUMA nodes, which `make numa` simulates."""
