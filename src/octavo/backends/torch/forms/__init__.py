"""The torch forms of operations, a file for each family. `octavo.backends.torch.operations` runs them."""
