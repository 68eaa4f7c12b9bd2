"""Merges for serving engines whose KV cache is sharded over ranks: vLLM, SGLang, and others with the same tensors.

        combine = functools.partial(attnmesh.engines.combine, cp_group=group)     # vLLM's DCPCombine
        attnmesh.engines.sglang.load_plugin                                       # SGLang's plug-in entry point

Importing this package imports no engine.
"""

from attnmesh.engines.combine import combine as combine
