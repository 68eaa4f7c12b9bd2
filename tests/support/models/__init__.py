"""Tiny random models of all types of transformers, and what a rank checks of them."""
