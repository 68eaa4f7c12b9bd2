"""Attention, masks and a cache for Hugging Face transformers, under the name "attnmesh".

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnmesh")
        tokens = attnmesh.hf.generate(model, input_ids, mesh=mesh, max_new_tokens=100)      # decoding over the mesh
        loss = model(**attnmesh.hf.shard_batch(batch, mesh)).loss                           # training over the mesh

Importing this package registers the name with transformers' attention and mask functions, and replaces nothing.
`generate`, `on_mesh` and others change the model that they are given: docs/models.md lists what they replace.
"""

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

from attnmesh.errors import warn_once
from attnmesh.hf.attention_function import attention_function
from attnmesh.hf.cache.sharded_cache import ShardedCache as ShardedCache
from attnmesh.hf.generate import generate as generate
from attnmesh.hf.generation_checkpoint import Checkpoint as Checkpoint
from attnmesh.hf.layer_mask import mask_function
from attnmesh.hf.models import ATTN_IMPLEMENTATION
from attnmesh.hf.prefill import prefill as prefill
from attnmesh.hf.recurrent.prepare_recurrent import restore as restore
from attnmesh.hf.serving.engine import Engine as Engine
from attnmesh.hf.serving.grammar_masks import Grammar as Grammar
from attnmesh.hf.serving.grammar_masks import GrammarTokens as GrammarTokens
from attnmesh.hf.serving.prefix_store import PrefixStore as PrefixStore
from attnmesh.hf.serving.row_pass import decode_rows as decode_rows
from attnmesh.hf.sharded_sequence import ShardedSequence as ShardedSequence
from attnmesh.hf.shared_weights import share_weights as share_weights
from attnmesh.hf.tensor_parallel import tensor_parallel as tensor_parallel
from attnmesh.hf.training.accelerator import prepare as prepare
from attnmesh.hf.training.batch import shard_batch as shard_batch
from attnmesh.hf.training.mean_over_mesh import mean_over_mesh as mean_over_mesh
from attnmesh.hf.training.trainer import on_mesh as on_mesh

AttentionInterface.register(ATTN_IMPLEMENTATION, attention_function)
AttentionMaskInterface.register(ATTN_IMPLEMENTATION, mask_function)


def __getattr__(name: str) -> Any:
    """Return `ShardedSequence` under its old name."""
    if name != "Shards":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_once("the name Shards is now attnmesh.hf.ShardedSequence, and will be removed", FutureWarning)
    return ShardedSequence
