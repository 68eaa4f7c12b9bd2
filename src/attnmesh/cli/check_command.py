"""The command `attnmesh check`: prove each kernel of this installation, and show which ones are chosen."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict

import typer
from rich.table import Table

from attnmesh.cli import proofs
from attnmesh.cli.output import Status, console, pairs, print_json, titled
from attnmesh.cli.proofs import Proof
from attnmesh.core.storage import STORAGES
from attnmesh.kernels.choice import KERNELS
from attnmesh.runtime.machine import machine
from attnmesh_command.plan_options import CheckOptions


def check(options: CheckOptions) -> None:
    """Prove the kernels, and show which ones are chosen."""
    with Status("the reference against the energy's gradient") as status:
        law = proofs.law_error()
        kernel_proofs = []
        for proof in proofs.proofs():
            status.update(f"proving kernel {proof.kernel} in {proof.dtype} on {proof.device}")
            kernel_proofs.append(proof)
    sound = law < proofs.LAW_TOLERANCE and all(proof.holds for proof in kernel_proofs)
    if options.as_json:
        records = [{**asdict(proof), "holds": proof.holds} for proof in kernel_proofs]
        choices = [asdict(choice) for choice in proofs.choices()]
        report = {"machine": machine(), "energy_law_error": law, "proofs": records, "choices": choices, "sound": sound}
        print_json(report)
    else:
        console.print(pairs("this installation", machine()))
        console.print(_choice_table())
        console.print(_proof_table(kernel_proofs))
        for absence in _absences([proof for proof in kernel_proofs if options.verbose or not proof.is_elsewhere]):
            console.print(absence)
        console.print(f"The reference in float64 equals the energy's gradient, and gradients of that, to {law:.1e}.")
        if options.verbose:
            made_for = "; ".join(f"{kernel.name} is made for {kernel.made_for}" for kernel in KERNELS)
            console.print(CHECK_EXPLAINED.format(made_for=made_for))
        exact = "All kernels here are exact, to the rounding of their dtype."
        console.print(exact if sound else "[bold red]A kernel here is wrong: do not use it.")
    raise typer.Exit(0 if sound else 1)


CHECK_EXPLAINED = """\
Each kernel runs forward and backward on 300 tokens, and on the last 3 queries of 300 keys. There are 6 query heads, 2
key heads, and values of another width. Masks are none, causal, a window, and packed documents. An error is the largest
difference from the reference in float64, relative to its largest value.

The kernels are in the order in which kernel="auto" takes them: the first that is made for a call, or else the first
that serves it. {made_for}.

int8 and fp8_e4m3 are decode steps on caches with that storage, beside float64 over the numbers that they store."""


def _proof_table(kernel_proofs: list[Proof]) -> Table:
    figures = ("out error", "gradient error", "allowed")
    table = titled("each kernel beside attention in float64", "kernel", "device", "dtype", figures=figures)
    table.add_column("verdict")
    for proof in kernel_proofs:
        if proof.absent is None:
            errors = ["-" if x is None else f"{x:.1e}" for x in (proof.out_error, proof.gradient_error, proof.allowed)]
            table.add_row(
                proof.kernel, proof.device, proof.dtype, *errors, "exact" if proof.holds else "[bold red]WRONG"
            )
    return table


def _choice_table() -> Table:
    table = titled('what kernel="auto" takes', "device", "dtype", "plain blocks", "masked blocks", "decoding")
    for choice in proofs.choices():
        table.add_row(*asdict(choice).values())
    return table


def _absences(kernel_proofs: list[Proof]) -> Iterator[str]:
    """Yield the unsupported kernels, with the reason."""
    dtypes = defaultdict[tuple[str, str, str], list[str]](list)
    for proof in kernel_proofs:
        if proof.absent is not None:
            dtypes[proof.kernel, proof.device, proof.absent].append(proof.dtype)
    for (kernel, device, reason), names in dtypes.items():
        in_dtypes = "" if len(names) == len(proofs.DTYPES) + len(STORAGES) else f" in {', '.join(names)}"
        yield f"Kernel {kernel} does not serve {device} tensors{in_dtypes}: {reason}."
