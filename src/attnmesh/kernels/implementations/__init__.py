"""Kernels of one device: each file has one, as its `KERNEL`, and no other file names it."""
