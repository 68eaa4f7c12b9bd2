"""Ranks that tests run on: worlds that stay, worlds that end, and what makes ranks differ."""
