"""The guard: ranks compare their calls, and fail alike."""
