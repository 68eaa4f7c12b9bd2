"""Models and clusters that the planner is asked about."""

from transformers import LlamaConfig

import attnmesh as am
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.rates import Device, Link
from attnmesh.planner.decode_cost import SharedLayers
from attnmesh.planner.serving import ModelSizes

LLAMA_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)

LAYERS = SharedLayers(
    2 * 10**8, (960, 576, 3072, 576) * 30 + (49152,), most_tokens=32, most_ranks=15, board_bytes=131_008
)


def model_of_cpus(rows: int = 1) -> ModelSizes:
    """Return a model whose 200 MB of weights in float32 ranks can share, and 1 MB that they cannot."""
    work = am.Workload(9, 3, 64, 4000, layers=30, dtype="float32", phase="decode", batch=rows)
    return ModelSizes(work, 576, 30, lambda ranks, _: 201 * 10**6 // ranks, active_parameters=5 * 10**7, shared=LAYERS)


def cpus(hosts: int = 1, ranks: int = 2) -> Cluster:
    device = Device(2.7e10, 3e10, 8e9, 6e9, copy_rate=4e9, call=4e-4)
    links = Link(5e-4, 5e8, 2e9, short=1e-4), Link(5e-4, 1.18e8, 1.18e8, message=4e-4)
    return Cluster("cpus", hosts, ranks, device, *links, short_collectives="ring")


SMALL = am.Workload(16, 4, 64, 16384)

CLUSTER = am.Cluster.preset("a100x4", hosts=2)
