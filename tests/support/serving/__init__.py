"""Servers, engines and clients."""
