"""Caches in a state that a test begins with: empty, random, grown, saved, or in two memories."""
