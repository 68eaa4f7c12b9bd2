"""Plug-ins for Hugging Face transformers: attention, masks and a cache under the name "attnmesh", which patch nothing.

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="attnmesh")
        tokens = attnmesh.hf.generate(model, input_ids, mesh=mesh, max_new_tokens=100)      # decoding over the mesh
        loss = model(**attnmesh.hf.shard_batch(batch, mesh)).loss                           # training over the mesh

Importing this package enters the name into transformers' registries of attention and mask functions.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from attnmesh.hf.attention import attention_function
from attnmesh.hf.cache import ShardedCache as ShardedCache
from attnmesh.hf.checkpoint import Checkpoint as Checkpoint
from attnmesh.hf.generate import generate as generate
from attnmesh.hf.generate import prefill as prefill
from attnmesh.hf.mask import mask_function
from attnmesh.hf.models import NAME
from attnmesh.hf.shards import Shards as Shards
from attnmesh.hf.training import shard_batch as shard_batch

AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, mask_function)
