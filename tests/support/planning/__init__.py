"""Plans, and what they are compared with."""
