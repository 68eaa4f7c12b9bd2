"""Tree Attention (arXiv 2408.04093): what it published, and what the model predicts.

python -m benchmarks.papers.tree_attention [--json]
"""

from dataclasses import replace
from functools import cache
from typing import Any

import typer

import attnmesh as am
from attnmesh.comm.merges import MERGES
from attnmesh.cost.candidate_mesh import CandidateMesh
from attnmesh.cost.cluster import Cluster
from attnmesh.cost.merge_cost import MergeGroup, MessageSize
from attnmesh.mesh.shapes import Shape
from attnmesh.planner.workload import Workload
from attnmesh.planner.workload_cost import cost
from attnmesh_command.shared_options import AsJson, OutFile
from benchmarks.papers import baselines
from benchmarks.papers.llama import LLAMA_1B, LLAMA_8B, Llama, generated, generated_best
from benchmarks.papers.report import Report, Row, Span, one, published, span

HEADS, WIDTH = 16, 128
DGX = Cluster.preset("dgx-h100", hosts=1)
MI300X = Cluster.preset("mi300x", ranks=4)
RTX4090 = Cluster.preset("rtx4090")

FIRST_CALL = (
    "The public script takes the time of the first call, compilation included, which hides a tree of half a "
    "millisecond. The model prices warm calls: at each of 127 steps the ring moves a shard of 328 MB, 6.8 ms over one "
    "48 GB/s card, of which a tree moves nothing. A ring is no baseline for decoding: attnmesh beside Algorithm 3 is."
)
HOPS = (
    "The ring, not the tree. What it took beyond the tree is 0.98 ms (32k) and 1.66 ms (64k) for each hop of 67 and "
    "134 MB, 69 and 81 GB/s where the links give 360. Its hops move keys and values repeated for all query heads (4 "
    "times the bytes), padded by way of float32 and copied, and are posted from Python after the device was asked for "
    "a length in each layer; the model prices the repeated bytes at the links' rate and the rest at nothing."
)
STEPS = (
    "0.15 s are not priced. Reading the prompt is in the time, with a ring over repeated keys in both; the model has "
    "it, and 43 calls of 10 us (assumed) in each of 288 layers' steps, but not Python between them."
)
ROCM = (
    "Model and lengths of this run are not known here; Llama-3.1-8B at 32k and 64k is assumed, where a ring, on one "
    "link of 48 GB/s of the 313 that a device has, loses more than at shorter lengths: 2.6 times at 8k, in their "
    "range. What both have in common is cheaper in the model, as on H100, and hides less of the difference."
)
PCIE = (
    "The published ratio asks for about 7 GB/s in a hop through the host's memory, which goes both ways at once there; "
    "the preset has 13, one way. The length is that of the public script, 20,000; that of the figure is not known "
    "here, and the ring's own copies and Python are not priced."
)
STARTS = "Three all-reduces as NCCL reckons them are 45 us; each of three besides starts a call at 10 us (assumed)."
ONE_SHOT = (
    "The exchange itself is 13 us: 7.2 us and 1 us for each of 6 further messages (assumed). The other 10 us start "
    "the merge of what came, which the figure leaves out."
)
WIDE = "The library sums partials in float32, twice the bytes of the paper's 16 bits."
NONE = (None, None, None)
UNKNOWN = "The paper's figure for this length is not among what is known here."


@cache
def report() -> Report:
    """Return all figures of the paper."""
    details = decodes() + generations()
    rows = (*headline(details), *lengths(details), *elsewhere(details), *memory(), *messages())
    return Report("Tree Attention", "arXiv 2408.04093", rows, tuple(details), (DGX, MI300X, RTX4090))


def decodes() -> list[dict[str, Any]]:
    """One layer, 16 heads of 128, on 8 to 128 H100: warm seconds of each."""
    records = []
    for ranks in (8, 16, 32, 64, 128):
        cluster = Cluster.preset("dgx-h100", hosts=ranks // 8)
        for tokens in (80_000, 320_000, 1_280_000, 5_120_000):
            workload = Workload(HEADS, HEADS, WIDTH, tokens, phase="decode")
            shard = workload.kept_bytes / ranks
            fastest = am.plan(workload, cluster)[0]
            tree, ring = baselines.algorithm_3(cluster, shard, HEADS, WIDTH), baselines.ring_decode(cluster, shard)
            case = {"case": "one layer", "gpus": ranks, "tokens": tokens}
            records.append({**case, "tree": tree, "ring": ring, "best": fastest.seconds, "plan": fastest.name})
    return records


def generations() -> list[dict[str, Any]]:
    """Whole models, 10 tokens with the prompt read: seconds of each."""
    runs = [(LLAMA_8B, DGX, k * 1024) for k in (32, 64, 128, 256)]
    runs += [(LLAMA_8B, MI300X, k * 1024) for k in (32, 64)] + [(LLAMA_1B, RTX4090, 20_000)]
    return [_generation(*run) for run in runs]


def _generation(model: Llama, cluster: Cluster, tokens: int) -> dict[str, Any]:
    tree, ring = (generated(model, tokens, cluster, decode) for decode in ("tree", "ring"))
    best, plan = generated_best(model, tokens, cluster)
    case = {"case": model.name, "cluster": cluster.name, "gpus": cluster.world, "tokens": tokens}
    return {**case, "tree": tree, "ring": ring, "best": best, "plan": plan}


def _gains(details: list[dict[str, Any]], **wanted: Any) -> tuple[Span, Span, str]:
    """Speed-ups over the ring of the tree and of the best plan, and that plan, in the cases with such entries."""
    cases = [case for case in details if wanted.items() <= case.items()]
    tree, best = (span(case["ring"] / case[name] for case in cases) for name in ("tree", "best"))
    return tree, best, cases[-1]["plan"]


def headline(details: list[dict[str, Any]]) -> list[Row]:
    """One layer on many GPUs: tree over ring."""
    gain = _gains(details, case="one layer", gpus=128, tokens=5_120_000)
    rows = [Row("one layer, 128 H100, 5.12M tokens", "x", one(8), *gain, FIRST_CALL)]
    for ranks in (8, 16, 32, 64, 128):
        gain = _gains(details, case="one layer", gpus=ranks)
        rows.append(Row(f"one layer, {ranks} H100, 80k to 5.12M tokens", "x", None, *gain))
    return rows


def lengths(details: list[dict[str, Any]]) -> list[Row]:
    """Llama-3.1-8B on 8 H100."""
    paper = {32: (0.60, 2.57), 64: (1.08, 4.42)}
    rows = []
    for k in (32, 64, 128, 256):
        case = next(x for x in details if x.get("cluster") == "dgx-h100" and x["tokens"] == k * 1024)
        name, best = f"Llama-3.1-8B, 8 H100, {k}k", (one(case["best"]), case["plan"])
        tree, ring, gain = (one(paper[k][0]), one(paper[k][1]), one(paper[k][1] / paper[k][0])) if k in paper else NONE
        case_rows = [
            Row(f"{name}, tree", "s", tree, one(case["tree"]), *best, why=STEPS),
            Row(f"{name}, ring", "s", ring, one(case["ring"]), why=HOPS),
            Row(f"{name}, speed-up", "x", gain, *_gains([case]), why=HOPS),
        ]
        rows += [row if row.off else replace(row, why="" if row.published else UNKNOWN) for row in case_rows]
    return rows


def elsewhere(details: list[dict[str, Any]]) -> list[Row]:
    """Return the figures on other devices."""
    return [
        Row("Llama-3.1-8B, 4 MI300X", "x", (2, 3), *_gains(details, cluster="mi300x"), ROCM),
        Row("Llama-3.2-1B, 2 RTX 4090", "x", (4, 5), *_gains(details, cluster="rtx4090"), PCIE),
    ]


def memory(tokens: int = 64_000) -> list[Row]:
    """Return what a ring holds beyond a tree, in MB: by the paper's formulas, and by the library's memory of a plan."""
    rows = []
    for hidden, gap in ((2048, 524), (4096, 1040)):
        heads = hidden // WIDTH
        by_formula = baselines.ring_memory(tokens, hidden) - baselines.tree_memory(tokens, hidden, heads)
        workload = Workload(heads, heads, WIDTH, tokens * DGX.world, phase="decode")
        shard_bytes = cost(
            CandidateMesh(Shape(1, 1, 8), Shape(1, 1, 8), am.Striped(16), "allreduce"), workload, DGX
        ).memory
        gaps = {
            "the paper's formulas": by_formula,
            "the library's, a ring holding one shard more": 2 * shard_bytes - shard_bytes,
        }
        for how, gap_bytes in gaps.items():
            case = f"gap in memory, hidden {hidden}, 64,000 tokens a device, by {how}"
            rows.append(Row(case, "MB", one(gap), one(gap_bytes / 1e6)))
    return rows


def messages() -> list[Row]:
    """Return what a merge moves and takes, beside what was derived from the paper's formulas and NCCL's constants."""
    workload = Workload(HEADS, HEADS, WIDTH, 80_000, phase="decode")
    price = cost(CandidateMesh(Shape(1, 1, 8), Shape(1, 1, 8), am.Striped(16), "allreduce"), workload, DGX)
    volume = one(baselines.tree_volume(8, HEADS * WIDTH, HEADS) / 1e3)
    three = baselines.algorithm_3(DGX, 0.0, HEADS, WIDTH) - DGX.device.call
    direct = MERGES["direct"].seconds(MergeGroup(8, 8), MessageSize(HEADS * 4.0, WIDTH), DGX)
    case = "8 H100, one layer: "
    return [
        Row(f"{case}bytes a rank, by its formula", "kB", volume, one(price.inside / 8e3), why=WIDE),
        Row(f"{case}three all-reduces", "us", (36, 100), one(three * 1e6), why=STARTS, source="derived"),
        Row(f"{case}one exchange at once", "us", (5, 10), one(direct * 1e6), why=ONE_SHOT, source="derived"),
    ]


def main(as_json: AsJson = False, out: OutFile = None) -> None:
    """Print what Tree Attention published beside what the model predicts."""
    published("python -m benchmarks.papers.tree_attention", [report()], as_json, out)


if __name__ == "__main__":
    typer.run(main)
