"""Attention on one device: blocks, the driver, the kernels, their selection, and the operator `attend`."""
