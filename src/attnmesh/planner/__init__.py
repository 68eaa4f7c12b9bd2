"""Prices of shapes before they run, of values of `core`, `runtime` and `mesh`. `Plan.init_mesh` alone makes a mesh."""
