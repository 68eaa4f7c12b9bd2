"""Families with recurrent layers that do not run on shards, and whose configurations do not say so."""

from attnmesh.hf.family import Family

FAMILIES = (
    Family("rwkv", "intermediate_size max_position_embeddings num_hidden_layers", refused="recurrent states"),
    Family("xlstm", "num_hidden_layers", refused="recurrent states"),
)
