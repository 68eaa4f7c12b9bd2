"""Ranks that tests run on: teams that stay, worlds that end, and what makes ranks differ."""
