"""Caches in a state that a test begins with: grown, saved, or in two memories."""
