"""The sharded cache, and decoding from it."""
