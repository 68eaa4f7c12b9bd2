"""GPUs, NCCL and Triton on a machine without a GPU."""
