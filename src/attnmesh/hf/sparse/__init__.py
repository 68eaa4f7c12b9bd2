"""Models that select their keys: scores of an indexer, recorded and run where the keys are."""
