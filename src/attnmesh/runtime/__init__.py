"""State of one process: its world of ranks, its machine, counters, kept values, and how it ends."""
