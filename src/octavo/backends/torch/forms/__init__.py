"""The torch forms of operations, one file for each family. `octavo.backends.torch.operations` runs them."""
