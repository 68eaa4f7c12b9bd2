"""Mathematics on tensors, without ranks: partials, masks, layouts, storage in 8 bits, digests."""
