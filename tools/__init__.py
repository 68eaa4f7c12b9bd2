"""Programs on the code: counts of it, trouble for it, and its release."""
