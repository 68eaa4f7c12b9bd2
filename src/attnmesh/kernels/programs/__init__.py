"""Programs of Triton, which PyTorch alone does not import."""
