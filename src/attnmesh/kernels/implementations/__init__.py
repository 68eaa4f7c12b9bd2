"""Kernels of one device: each file has one, as its `KERNEL`, which may build on another. No file outside names one."""
