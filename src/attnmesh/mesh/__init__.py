"""Who holds and who computes what, as values; nothing is sent here."""
