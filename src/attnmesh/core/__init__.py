"""Mathematics on tensors, without ranks: partials, masks, layouts, argument checks, digests."""
