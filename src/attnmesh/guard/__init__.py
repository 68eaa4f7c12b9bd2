"""The guard: calls are checked and compared between ranks, which fail alike."""
