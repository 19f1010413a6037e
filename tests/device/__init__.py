"""Devices for tests that need no GPU, one for each framework: `torch` and `paddle`.

Their streams are threads and run later what they are given, as a GPU does, so that whatever forgets to wait
reads what is not there yet. `streams.h` has those streams and knows no framework, `build.py` builds a device
once for all processes. Where no GPU is, `make test-device` runs the tests of GPUs on them, and those of this
folder: `test_device.py` tests torch's device itself, `test_training.py`, `test_paddle_training.py` and
`test_programs.py` train on them.
"""

LAG_US = "PACELINE_TEST_DEVICE_LAG_US"
"""Each task of a stream begins so many microseconds later (300): a host that does not wait is ahead of it."""
