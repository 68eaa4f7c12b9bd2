"""Caches on disk, and recovery after lost ranks."""
