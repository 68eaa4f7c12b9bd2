"""Caches on disk, and recovery after lost ranks. It binds `save` and `load` of a `KVCache`."""

from attnmesh.cache.make_shards import open_folder
from attnmesh.cache.saved_cache import load_caches, save_caches
from attnmesh.store import kv_folder, load_layers, save_layers

save_caches.bind(save_layers.save_layers)
load_caches.bind(load_layers.load_layers)
open_folder.bind(kv_folder.KVFolder)
