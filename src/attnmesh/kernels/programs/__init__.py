"""Triton programs. Importing them needs Triton."""
