"""A store of prefixes that outlives caches and ranks: its settings, its folder, and the name of a model in it."""

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from attnmesh.comm.topology import dist_all_gather_ints
from attnmesh.core.digest import digest
from attnmesh.errors import ArgumentError, KernelError, check_count
from attnmesh.guard.agreement import Agreement
from attnmesh.hf.cache.sharded_cache import ShardedCache
from attnmesh.hf.generation_checkpoint import IGNORED_CONFIG
from attnmesh.hf.models import is_compressed
from attnmesh.hf.tensor_parallel import tp_mesh
from attnmesh.mesh.axes import RankMesh
from attnmesh.store.block_folder import STORE_SUBJECT, WRITERS, BlockFolder, FolderLock, check_seen, make_private_folder
from attnmesh.store.block_names import BLOCK_GRAIN, HASH_BYTES

KEYS_VERSION = 1
"""Version of the rules by which keys are computed and stored. Blocks of another version are not found."""

RELEASE_SECONDS = 10.0
"""Seconds to wait for the ranks of an earlier engine, which may still hold the folder after they were ended."""


@dataclass(frozen=True)
class PrefixStore:
    """Place of prefixes of prompts of an engine when their caches go: in memory of its ranks, and in a folder.

        engine = hf.Engine(model, mesh, store=hf.PrefixStore("prefixes", disk=20 << 30))

    Args:
        folder: A folder of this user alone, on a disk that all ranks share. One engine uses it at a time.
        memory: Bytes in memory, of all ranks together.
        disk: Bytes in the folder.
        source: What else prefixes depend on, beside the model's weights, configuration and dtype: its tokenizer.
    """

    folder: str | Path
    memory: int = 1 << 30
    disk: int = 10 << 30
    source: str = ""

    def check(self, model: PreTrainedModel, cache: ShardedCache) -> None:
        """Raise unless the store can keep prefixes of the model, in caches like this one."""
        for name, size in (("memory", self.memory), ("disk", self.disk)):
            check_count(f"{STORE_SUBJECT} {name}", size, "count the bytes as an int", error=ArgumentError)
        if is_compressed(model.config):
            given = f"{model.config.model_type}, which compresses them"
            raise KernelError(STORE_SUBJECT, "a model that keeps keys of tokens", given, "leave the store out")
        if tp_mesh(model) is not None and cache.output != "heads":
            expected = "ranks that hold all key heads of their tokens"
            given = "ranks that share weights and heads beside the mesh"
            fix = 'write --mesh tp=keys=4, or pass output="heads" to hf.tensor_parallel and hf.Engine'
            raise KernelError(STORE_SUBJECT, expected, given, fix)
        if cache.block % BLOCK_GRAIN:
            fix = f"leave block= out, or take a multiple of {BLOCK_GRAIN}"
            raise KernelError(STORE_SUBJECT, f"blocks of {BLOCK_GRAIN} tokens", f"blocks of {cache.block}", fix)
        make_private_folder(self.folder)


@dataclass(frozen=True)
class OpenStore:
    """A folder that this engine holds, and the name of the model whose prefixes it takes."""

    folder: BlockFolder
    name: str
    """Name of the model, by which the first rank names blocks. Names of other ranks may differ, and are not used."""
    lock: FolderLock
    """Lock of the folder, which each rank holds as long as it may write."""


def open_store(store: PrefixStore, model: PreTrainedModel, cache: ShardedCache) -> OpenStore:
    """Open the folder on all ranks. If one cannot, all raise its error. Collective over the ranks of the mesh.

    Rank 0 takes the folder's lock for itself, and waits until no rank of an earlier engine writes. Then each other rank
    takes a share of the lock of writers, for which a later engine waits in turn.
    """
    mesh = RankMesh.of(cache.mesh)
    locks = list[FolderLock]()
    try:
        fields = {"memory": store.memory, "disk": store.disk, "source": store.source}
        with Agreement(mesh, STORE_SUBJECT) as agreement:
            store.check(model, cache)
            if not mesh.shard_index:
                locks.append(FolderLock(make_private_folder(store.folder), patience=RELEASE_SECONDS))
                # Ranks of an earlier engine may still write.
                FolderLock(make_private_folder(store.folder), WRITERS, patience=RELEASE_SECONDS).release()
            table = agreement.compare(fields, payload=[lock.write_number() for lock in locks] or [0])
        folder = make_private_folder(store.folder)
        with Agreement(mesh, STORE_SUBJECT):
            check_seen(folder, table[0][0])
            if mesh.shard_index:
                locks.append(FolderLock(folder, WRITERS, shared=True))
        return OpenStore(BlockFolder(folder), _name_of(store, model, cache), locks[0])
    except BaseException:
        for lock in locks:
            lock.release()
        raise


def _name_of(store: PrefixStore, model: PreTrainedModel, cache: ShardedCache) -> str:
    """Return a hash of all that a token's keys depend on beside the tokens up to it. Collective for split weights."""
    from attnmesh import __version__

    is_shared = tp_mesh(model) is not None
    mesh = RankMesh.of(cache.mesh)
    first = not mesh.shard_index
    weights = [_weights_digest(model) if is_shared or first else 0]
    if is_shared:  # each rank has its share of the weights
        weights = [numbers[0] for numbers in dist_all_gather_ints(weights, mesh.axes)]
    config = {name: value for name, value in model.config.to_dict().items() if name not in IGNORED_CONFIG}
    cache_options = [str(model.dtype), cache.storage, cache.window_storage, cache.windows, cache.keep]
    parts = [KEYS_VERSION, __version__, transformers_version, store.source, weights, config, cache_options]
    return blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=HASH_BYTES).hexdigest()


def _weights_digest(model: PreTrainedModel) -> int:
    """Return a digest of all weights that this rank has, by their names, dtypes and shapes."""
    hasher = blake2b(digest_size=7)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        own = x.to_local() if isinstance(x, DTensor) else x
        bits = own.detach().contiguous().flatten().view(torch.uint8)
        hasher.update(f"{name} {x.dtype} {[*x.shape]} {'' if bits.is_cpu else int(digest(bits))};".encode())
        if bits.is_cpu:
            hasher.update(bits.numpy().data)
    return int.from_bytes(hasher.digest(), "little")
