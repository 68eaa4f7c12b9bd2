"""Programs on the code itself."""
