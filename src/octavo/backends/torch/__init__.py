"""The backend on torch tensors: on a GPU if there is one, else on the CPU. Needs torch, which the CPU install lacks."""

from octavo.backends.torch.compile import TorchBackend

on_device = TorchBackend.on
