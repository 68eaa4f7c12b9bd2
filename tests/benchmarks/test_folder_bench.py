"""The bench of a cache in a folder: its step has the bits of memory, and each file is read whole."""

from pathlib import Path

import torch

from attnmesh.decoding.decode_call import decode
from attnmesh.store.layer_files import PIECE_TOKENS
from benchmarks import folder


def test_rows_are_those_of_a_cache_in_memory(tmp_path: Path) -> None:
    request = folder.Request(PIECE_TOKENS * folder.TOKEN_BYTES, 1 << 30, tmp_path, 2)
    cache, plain = folder.cache_of(tmp_path, PIECE_TOKENS), folder.cache_of(None, PIECE_TOKENS)
    for each in (cache, plain):
        generator = torch.Generator().manual_seed(0)
        for tokens in (PIECE_TOKENS, 9):
            each.append(*torch.randn(2, 1, folder.KV_HEADS, tokens, folder.DIM, generator=generator).bfloat16())
    wanted = decode(folder.queries(), plain).float().flatten().tolist()
    row = folder._step(cache, request, wanted, None)
    assert row.different == 0
    assert row.bytes == (PIECE_TOKENS + 9) * folder.TOKEN_BYTES
    assert folder._append(cache, 3, request, None).bytes == 3 * folder.TOKEN_BYTES
    assert cache.length == PIECE_TOKENS + 9 + 3 * 1000
    (file,) = tmp_path.glob("1-*/*.safetensors")
    assert folder._read(file) == file.stat().st_size
