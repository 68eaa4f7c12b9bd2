"""Options of `attnmesh plan`, `probe` and `check`, which check themselves before anything slow is imported."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from attnmesh_command.choices import CLUSTER_SIZES, DTYPE_NAMES, LOSSES, PHASES, WORKLOAD_NAMES
from attnmesh_command.messages import OptionError, check_named, check_option
from attnmesh_command.option_texts import (
    check_model,
    cluster_size_of,
    heads_of,
    latent_of,
    length_of,
    recurrent_of,
)
from attnmesh_command.shared_options import AsJson, KvOption, OutFile, Verbose, check_kv, check_ranks, writable

ClusterOption = Annotated[
    str,
    typer.Option(
        help="local, which is this machine; a preset, as dgx-h100:16 or dgx-h100:16x4 (hosts x ranks); or a file of "
        "attnmesh probe. Hosts x ranks of a name alone: "
        f"{', '.join(f'{name} {hosts}x{ranks}' for name, (hosts, ranks) in CLUSTER_SIZES.items())}."
    ),
]
LengthOption = Annotated[
    str | None,
    typer.Option(help="Tokens: 4096, 128k (128,000), 5M or 5e6, 128Ki (131,072), 1Mi. Required without --workload."),
]
PlannedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Heads, layers and widths of this model: a folder, a config.json, a name on the hub. With --decode or "
        "--training also its weights, and how many tokens fit beside them.",
    ),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(help=f"Attention of a diffusion transformer in one denoising step: {', '.join(WORKLOAD_NAMES)}."),
]
HeadsOption = Annotated[
    str | None, typer.Option(help="Query heads / key heads, as 32/8; or one number for both. Or pass --model.")
]
HeadDimOption = Annotated[int | None, typer.Option(min=1, help="Columns of a query and of a key; 128 by default.")]
LatentOption = Annotated[
    str | None, typer.Option(help="Latent attention: columns that are projected / rotated, as 512/64.")
]
LoraOption = Annotated[
    int, typer.Option("--lora", min=0, help="With --model --training: rank of an adapter to train; 0 trains the model.")
]
LossOption = Annotated[
    str | None,
    typer.Option(
        help="With --model --training: fused, tile by tile, as TRL's trainers compute it, or full, of all tokens' "
        "logits. By default fused where TRL is installed."
    ),
]
OffloadOption = Annotated[
    bool,
    typer.Option("--offload", help="With --model --training: inputs of checkpointed layers wait in CPU memory."),
]
DdpOption = Annotated[
    bool, typer.Option("--ddp", help="With --model --training: each rank holds all weights, where FSDP2 shards them.")
]
RolloutOption = Annotated[
    int,
    typer.Option(
        "--rollout",
        min=0,
        help="With --model --training: completions, of --length tokens with their prompt, that the ranks of a sequence "
        "draw at once, for each of --batch. Implies --ddp.",
    ),
]
LayersOption = Annotated[int | None, typer.Option(min=1, help="Attention layers, one after the other; 1 by default.")]
RecurrentOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Recurrent layers: heads x rows x columns of a state, then :matrix, :diagonal or :scalar, :layers=N and "
        ":conv=CHANNELSxWIDTH, as 32x128x128:matrix:layers=36:conv=8192x4. Give it once for each kind."
    ),
]
QLenOption = Annotated[int | None, typer.Option(min=1, help="New tokens per sequence in a decode step; 1 by default.")]
WindowOption = Annotated[
    int | None, typer.Option(min=0, help="A token sees itself and this many before it; all before it by default.")
]
ReportFile = Annotated[
    Path | None,
    typer.Option(help="Also write an interactive page to this .html: sizes can be changed.", dir_okay=False),
]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Predict the time of every way to run attention on a cluster: the fastest first, with its reasons."""

    cluster: ClusterOption
    length: LengthOption = None
    model: PlannedModel = None
    workload: WorkloadOption = None
    heads: HeadsOption = None
    head_dim: HeadDimOption = None
    value_dim: Annotated[int | None, typer.Option(min=1, help="Columns of a value, if not --head-dim.")] = None
    latent: LatentOption = None
    training: Annotated[
        bool, typer.Option("--training", help="Forward and backward; the default without --workload.")
    ] = False
    prefill: Annotated[bool, typer.Option("--prefill", help="Forward only.")] = False
    lora: LoraOption = 0
    loss: LossOption = None
    offload: OffloadOption = False
    ddp: DdpOption = False
    rollout: RolloutOption = 0
    decode: Annotated[bool, typer.Option("--decode", help="One step, with --length cached tokens.")] = False
    layers: LayersOption = None
    recurrent: RecurrentOption = None
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1
    q_len: QLenOption = None
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPE_NAMES)}.")] = "bfloat16"
    kv: KvOption = "auto"
    window: WindowOption = None
    full: Annotated[bool, typer.Option("--full", help="No mask: all tokens see all tokens.")] = False
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 10
    report: ReportFile = None
    as_json: AsJson = False
    verbose: Verbose = False

    def __post_init__(self) -> None:
        cluster_size_of(self.cluster)
        check_named("--dtype", self.dtype, DTYPE_NAMES)
        check_kv(self.kv)
        phases = [f"--{phase}" for phase in PHASES if getattr(self, phase)]
        fix = "plan for each in a command of its own"
        check_option(len(phases) < 2, "attnmesh plan", "one phase", " and ".join(phases), fix)
        given = f"--full and --window {self.window}"
        check_option(not self.full or self.window is None, "attnmesh plan", "one mask", given, "leave one out")
        for option, value in (("--q-len", self.q_len), ("--kv", None if self.kv == "auto" else self.kv)):
            fits = value is None or self.decode
            fix = f"add --decode, or leave {option} out"
            check_option(fits, option, "--decode beside it", value, fix)
        if self.workload is not None:
            self._check_workload(self.workload)
        elif self.length is None:
            raise OptionError("attnmesh plan", "--length or --workload", "neither", "write --length 128k")
        if self.length is not None:
            tokens, new = length_of(self.length), self.q_len or 1
            expected, fix = f"at most the {tokens:,} tokens of --length, of which they are the last", "raise --length"
            check_option(new <= tokens, "--q-len", expected, new, fix)
        self._check_sizes()
        self._check_report()

    @property
    def phase(self) -> str:
        """The phase that is planned."""
        default = "training" if self.workload is None else "prefill"
        return next((phase for phase in PHASES if getattr(self, phase)), default)

    @property
    def is_whole_model(self) -> bool:
        """True if a model's weights are planned with its attention."""
        return self.model is not None and self.workload is None and (self.decode or self.training)

    @property
    def sizes(self) -> dict[str, Any]:
        """The options that have sizes of attention, as a model or a workload has them."""
        sizes: dict[str, Any] = {"--heads": self.heads, "--head-dim": self.head_dim, "--value-dim": self.value_dim}
        sizes |= {"--latent": self.latent, "--layers": self.layers, "--recurrent": self.recurrent}
        return sizes | {"--window": self.window, "--full": self.full}

    def _check_workload(self, name: str) -> None:
        check_named("--workload", name, WORKLOAD_NAMES)
        check_alone({"--model": self.model, **self.sizes}, "sizes of the workload alone", beside="--workload")
        fix = "leave it out, or pass --training"
        check_option(not self.decode, "attnmesh plan --workload", "a forward pass, or training", "--decode", fix)

    def _check_sizes(self) -> None:
        """Raise on sizes that are none, or that stand beside a model's."""
        trains: dict[str, Any] = {"--lora": self.lora, "--loss": self.loss, "--offload": self.offload}
        for option, value in (trains | {"--ddp": self.ddp, "--rollout": self.rollout}).items():
            fits = not value or (self.model is not None and self.training)
            fix = f"add them, or leave {option} out"
            check_option(fits, option, "--model and --training beside it", value, fix)
        if self.loss is not None:
            check_named("--loss", self.loss, LOSSES)
        if self.model is not None:
            check_model(self.model)
            check_alone(self.sizes)
        elif self.workload is None and self.heads is None:
            fix = "write --heads 32/8, or --model NAME"
            raise OptionError("attnmesh plan", "--heads or --model", "neither", fix)
        if self.heads is not None:
            heads_of(self.heads)
        if self.latent is not None:
            latent_of(self.latent)
        for text in self.recurrent or ():
            recurrent_of(text)

    def _check_report(self) -> None:
        if self.report is None:
            return
        fits = self.report.suffix.lower() in (".html", ".htm")
        given = repr(str(self.report))
        check_option(fits, "--report", "a file named .html", given, "name it plan.html")
        if self.is_whole_model:
            phase = "decoding" if self.decode else "training"
            check_alone({"--report": self.report}, f"no picture of a model in {phase}")
        writable("--report", self.report)


def check_alone(given: Mapping[str, Any], expected: str = "sizes of the model alone", beside: str = "--model") -> None:
    """Raise if options are given that do not go with a model, or with the option `beside`."""
    for option, value in given.items():
        if value not in (None, []) and value is not False:  # `--window 0` is given
            raise OptionError(option, expected, repr(value), f"leave {option} or {beside} out")


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Measure links and devices of the ranks of torchrun, or of ranks started on this machine, all at work (20 s).

    The file that `--out` writes is a cluster for `attnmesh plan --cluster FILE`. The constants of this machine are
    kept in the user's cache folder too, where `exchange="auto"` reads them.
    """

    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine, of one thread each.")] = 4
    as_json: AsJson = False
    verbose: Verbose = False
    out: OutFile = None

    def __post_init__(self) -> None:
        check_ranks(self.ranks)


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Prove each kernel of this installation against attention in float64, and show which kernels are chosen."""

    as_json: AsJson = False
    verbose: Verbose = False
