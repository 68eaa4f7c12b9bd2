"""Caches on disk, and recovery after lost ranks. It binds `save` and `load` of a `KVCache`."""

from attnmesh.cache.make_shards import open_folder
from attnmesh.cache.saved_cache import load_caches, save_caches
from attnmesh.store import checkpoint, checkpoint_writer, kv_folder

save_caches.bind(checkpoint_writer.save_layers)
load_caches.bind(checkpoint.load_layers)
open_folder.bind(kv_folder.KVFolder)
