"""Meshes as values, without communication: shapes, axes, schedules, reduction trees, marks of shards."""
