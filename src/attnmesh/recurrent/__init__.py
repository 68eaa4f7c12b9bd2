"""Recurrent layers: scans of their states, halos of their convolutions, exchanges of their heads."""
