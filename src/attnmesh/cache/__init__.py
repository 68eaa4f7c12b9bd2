"""Keys and values of a sequence, sharded over the ranks of a mesh: what is held, and how it grows."""
