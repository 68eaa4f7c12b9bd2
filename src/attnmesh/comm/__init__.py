"""Everything that crosses ranks."""
