"""Prices by which a run itself chooses: machines and their rates, exchanges of attention, parts of merges."""
