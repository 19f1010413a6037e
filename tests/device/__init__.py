"""Stand-in devices for tests without a GPU, one for each framework: `torch` and `paddle`.

Their streams are threads that run work asynchronously, as a GPU does, so that code which forgets to wait
reads data that is not there yet. `streams.h` has those streams and is independent of the framework;
`build.py` builds a device once for all processes. Without a GPU, `make test-device` runs the tests of GPUs on
them, and those of this folder: `test_device.py` tests torch's device itself; `test_training.py`,
`test_paddle_training.py` and `test_programs.py` train on them.
"""

LAG_US = "PACELINE_TEST_DEVICE_LAG_US"
"""The delay of each task of a stream in microseconds (300): a host that does not wait gets ahead."""
