"""The backend on torch tensors: a GPU where there is one, else the CPU. Needs torch, which the CPU install lacks."""

from octavo.backends.torch.compile import TorchBackend

on_device = TorchBackend.on
