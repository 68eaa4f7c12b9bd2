"""Prefill and training: attention on a mesh."""
