"""Bad arguments of what makes a mesh, measures it, plans it and takes its ranks back."""

from typing import Any

import torch
import torch.distributed as dist

import attnmesh as am
from attnmesh.errors import ClusterError, DeviceError, DtypeError, KernelError, MaskError, MeshError, ShapeError
from attnmesh.mesh.shapes import Shape
from tests.refusals.refusal import SIZES, Place, Table, filled


def measure(at: Place, **changes: Any) -> None:
    am.Cluster.measure(at.mesh, **changes)


def recover(at: Place, caches: Any = None) -> None:
    given = {None: [filled(at)], "of two": [filled(at), am.KVCache(None, **SIZES)]}
    am.recover(given.get(caches, caches), at.mesh)


def init_mesh(at: Place, **changes: Any) -> None:
    given = {"device_type": "cpu", "shape": Shape(1, 1, dist.get_world_size()), "q_heads": 4, "kv_heads": 2}
    am.init_mesh(**given | changes)


def plan_init_mesh(at: Place, device_type: Any = "cpu", hosts: int = 1) -> None:
    cluster = am.Cluster.preset("a100x4", hosts=hosts, ranks=dist.get_world_size())
    am.plan(am.Workload(4, 2, 64, 4096), cluster)[0].init_mesh(device_type)


def mesh_shape(_: Place, **changes: Any) -> None:
    am.mesh_shape(**{"ranks": 4, "q_heads": 4, "kv_heads": 2} | changes)


def workload(_: Place, **changes: Any) -> None:
    am.Workload(**{"q_heads": 4, "kv_heads": 2, "head_dim": 64, "length": 4096} | changes)


def preset(_: Place, name: Any = "a100x4", **changes: Any) -> None:
    am.Cluster.preset(name, **changes)


def plan(_: Place, **changes: Any) -> None:
    am.plan(**{"workload": am.Workload(4, 2, 64, 4096), "cluster": am.Cluster.preset("a100x4")} | changes)


def set_deadline(_: Place, seconds: Any) -> None:
    am.set_deadline(seconds)


ON_ONE_RANK: Table = {
    measure: [
        ({"dtype": "float32"}, DtypeError, r"Cluster.measure dtype: .* one of .*, given 'float32'\. Fix: pass"),
        ({"dtype": torch.int8}, DtypeError, r"Cluster.measure dtype: .* one of .*, given torch.int8\. Fix"),
        ({"dtype": torch.float64}, MeshError, r"Cluster.measure: expected the same .*\n(.*\n)*.*torch.float64\n"),
    ],
    recover: [
        (
            {"caches": 5},
            DtypeError,
            r"recover: expected a list of caches, one per layer, given int\. Fix: pass \[cache\]",
        ),
        (
            {"caches": "of two"},
            MeshError,
            r"recover: expected caches of one mesh, given caches of 2 meshes\. Fix: pass",
        ),
    ],
    init_mesh: [
        ({"shape": Shape(1, 2, 4)}, MeshError, r"init_mesh: expected at most the world's \d ranks, given 1x2x4\. Fix"),
        (
            {"shape": (2, 1)},
            MeshError,
            r"init_mesh shape: expected \(heads, queries, keys\).*, given \(2, 1\)\. Fix",
        ),
        (
            {"shape": (1, 0, 2)},
            MeshError,
            r"init_mesh shape: expected .* each 1 or more, given \(1, 0, 2\)\. Fix",
        ),
        ({"shape": [1, True, 1]}, MeshError, r"init_mesh shape: expected .*, given \[1, True, 1\]\. Fix: pass"),
        ({"shape": (-1, -2, 1)}, MeshError, r"init_mesh shape: expected .*, given \(-1, -2, 1\)\. Fix: pass a tuple"),
        (
            {"shape": "1x1x2"},
            MeshError,
            r"init_mesh shape: expected .*, given '1x1x2'\. Fix: pass a tuple",
        ),
        ({"shape": None}, MeshError, r"init_mesh shape: expected .*, given None\. Fix: pass a tuple as \(1, 2, 2\)"),
        (
            {"shape": (1, 1, 1)},
            MeshError,
            r"init_mesh: .* same call .*:\n    ranks  shape\n(.*\n)*.*keys=1\)",
        ),
        ({"device_type": "foo"}, DeviceError, r"init_mesh device_type: expected a type of .*, given 'foo'\. Fix: "),
        ({"device_type": "cuda:0"}, DeviceError, r"init_mesh device_type: expected a type of .*, given 'cuda:0'\. F"),
        ({"q_heads": 8}, MeshError, r"init_mesh: expected the same call .*:\n    ranks  q_heads\n(.*\n)*.*  8\n"),
        ({"q_heads": 0}, MeshError, r"init_mesh: expected at least one of each, .*, given \d ranks, 0 query heads, 2"),
        ({"q_heads": 2, "kv_heads": 4}, MeshError, r"whole groups of heads, given \d ranks, 2 query heads, 4 key"),
    ],
    plan_init_mesh: [
        ({"hosts": 2}, MeshError, r"Plan.init_mesh: expected a world of \d ranks, given \d\. Fix: start"),
        ({"device_type": None}, DeviceError, r"Plan.init_mesh device_type: expected a type of .*, given None\. "),
    ],
}

ON_ALL_RANKS: Table = {
    mesh_shape: [
        ({"ranks": 0}, MeshError, r"mesh_shape: expected at least one of each, .* given 0 ranks, 4 query heads"),
        ({"q_heads": "4"}, MeshError, r"mesh_shape: expected at least one of each, .* '4' query heads, 2 key heads"),
        ({"kv_heads": 3}, MeshError, r"whole groups of heads, given 4 ranks, 4 query heads, 3 key heads\. Fix: pass"),
    ],
    workload: [
        ({"q_heads": 3}, ShapeError, r"Workload: expected whole groups .*, given 3 query heads on 2 key heads\. Fix"),
        ({"length": 0}, ClusterError, r"Workload length: expected a whole number, 1 or more, given 0\. Fix: pass"),
        ({"dtype": "int8"}, DtypeError, r"Workload dtype: expected one of .*, given 'int8'\. Fix: name"),
        ({"phase": "dreaming"}, KernelError, r"Workload phase: expected one of training, .*, given 'dreaming'\. Fix"),
        ({"latent": 512}, ShapeError, r"Workload latent: expected two numbers of columns, given 512\. Fix: pass"),
        ({"latent": (0, 4)}, ClusterError, r"Workload latent: expected a whole number, 1 or more, given 0\. Fix: pass"),
        ({"latent": (8, 64)}, ShapeError, r"Workload latent: expected fewer rotated .*, given 64 of 64\. Fix: pass"),
        ({"mask": None}, MaskError, r"Workload mask: expected Full.*, given None\. Fix: use Full"),
    ],
    preset: [
        ({"name": "abacus"}, ClusterError, r"Cluster.preset: expected one of .*, given 'abacus'\. Fix: pass one"),
        ({"hosts": 0}, ClusterError, r"Cluster hosts: expected a whole number, 1 or more, given 0\. Fix: pass"),
        ({"ranks": 64}, ClusterError, r"expected at most 4 ranks a host, given 64 ranks a host\. Fix: take more hosts"),
    ],
    plan: [
        ({"workload": 7}, ClusterError, r"plan: expected a Workload and a Cluster, given int and Cluster\. Fix: call"),
        ({"cluster": None}, ClusterError, r"expected a Workload and a Cluster, given Workload and NoneType\. Fix"),
    ],
    set_deadline: [
        ({"seconds": -1}, MeshError, r"set_deadline: expected more than 0 seconds, or None, given -1\. Fix: pass"),
        ({"seconds": "soon"}, MeshError, r"set_deadline: expected more than 0 seconds, or None, given 'soon'\. Fix"),
    ],
}
