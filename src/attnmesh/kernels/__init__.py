"""Attention on one device: rectangles, the driver, the kernels, their selection, and the operator `attend`."""
