"""Recurrent layers of transformers on shards."""
