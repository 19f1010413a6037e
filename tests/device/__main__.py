"""`python -m tests.device`: builds the devices of all frameworks that are installed.

Prints CUSTOM_DEVICE_ROOT for Paddle's; nothing, if Paddle is not installed.
"""

import importlib.util

from tests.device import paddle

if importlib.util.find_spec("torch") is not None:
    from tests.device import torch

    torch.build()
if importlib.util.find_spec("paddle") is not None:
    print(paddle.build())
