"""A step of decoding: keys stay on their ranks, and the query goes to them."""
