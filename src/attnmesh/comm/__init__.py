"""Exchanges between ranks: tokens, partials, numbers, and the failures of ranks."""
