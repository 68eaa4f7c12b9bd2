"""Training on shards: batches, labels, trainers and accelerators."""
