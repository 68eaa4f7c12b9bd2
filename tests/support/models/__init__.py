"""Tiny random models of transformers and of diffusers, and what a rank checks of them."""
