"""Attention on one device: rectangles, the driver, the kernels, their selection, and the calls without ranks."""
