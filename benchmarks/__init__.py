"""Benchmarks beside the package, and their dated results."""
