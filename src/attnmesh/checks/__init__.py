"""Checks of a rank's own arguments. Nothing is sent."""
