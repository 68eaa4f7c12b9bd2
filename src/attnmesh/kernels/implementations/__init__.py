"""Kernels of one device: each file has one, as its `KERNEL`, which may build on another.

Files outside take a kernel by what its fields say. The only name that they know is "reference".
"""
