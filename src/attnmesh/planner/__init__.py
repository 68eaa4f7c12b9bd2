"""Prices of shapes before they run; pure: it imports `core`, `runtime` and `mesh` alone."""
