"""Tools that look for trouble for as long as they are asked to."""
