"""Prices of shapes before they run; pure: it imports `core` and `mesh` alone."""
