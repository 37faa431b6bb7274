"""The torch backend. It runs on a GPU if there is one, otherwise on the CPU, and needs torch, which the CPU install
lacks.
"""

from octavo.backends.torch.compile import TorchBackend

on_device = TorchBackend.on
