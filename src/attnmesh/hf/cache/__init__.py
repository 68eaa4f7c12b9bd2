"""The cache of transformers, sharded: one layer a `KVCache` or a recurrent state."""
