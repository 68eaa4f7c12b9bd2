"""Mistakes of users: each raises on all ranks alike, and its message names the mistake."""
