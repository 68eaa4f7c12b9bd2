"""Kernels of one device: each file has one, as its `KERNEL`, which may build on others here. No file outside names one."""
