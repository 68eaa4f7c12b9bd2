"""The mathematics, on tensors: partials, masks, layouts, checks of arguments, digests. It knows no rank."""
