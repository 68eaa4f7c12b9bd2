"""Serving: steps of several requests at once, and the engine that schedules them."""
