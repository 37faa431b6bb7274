"""The torch backend. It runs on a GPU if there is one, otherwise on the CPU, and needs torch. The CPU install does not
include torch.
"""

from octavo.backends.torch.compile import TorchBackend

on_device = TorchBackend.on
