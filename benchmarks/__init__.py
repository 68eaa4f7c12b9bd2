"""What the library is held against, and the dated results of it."""
