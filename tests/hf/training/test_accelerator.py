"""Accelerators whose processes are meshes: what each public method does on two meshes, on one, and on one rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import attnmesh.hf as hf
from attnmesh import errors
from attnmesh.hf.training.accelerator import MeshAccelerator, Replicas, check_parallelism
from attnmesh.mesh.shapes import AXES, Shape
from tests.support.models import families
from tests.support.models.families import prompt
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import STEPS, collate, examples, forget_accelerate, launched, mesh_of
from tests.support.truth.mesh_problems import named_mesh
from tests.support.truth.tolerances import FLOAT32_SUMS, TRAINED

PAIR = Shape(1, 1, 2)


@contextmanager
def accelerator_of(meshes: int = 2, shape: Shape = PAIR, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Give an accelerator whose processes are so many meshes of this shape, and its model."""
    with launched():
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, **options)
        model = families.model("qwen3", "attnmesh").train()
        yield accelerator, hf.prepare(accelerator, model, mesh_of(meshes, shape))


# --- processes ---


@on_each_rank
def return_processes() -> list[tuple[int, int]]:
    """Return the number of processes and this one's index: in training, while batches are dealt out, and in files."""
    with accelerator_of() as (accelerator, _):
        counts = [(accelerator.num_processes, accelerator.process_index)]
        with accelerator.dealing():
            counts.append((accelerator.num_processes, accelerator.process_index))
        with accelerator.sharder.active(False):
            counts.append((accelerator.num_processes, accelerator.process_index))
        return counts


def test_meshes_count_in_training_and_ranks_in_files(pool: Pool) -> None:
    for rank, counts in enumerate(pool.run(4, return_processes)):
        assert counts == [(2, rank), (2, rank // 2), (4, rank)]


@on_each_rank
def return_index_after_dealing() -> tuple[int, int]:
    with accelerator_of() as (accelerator, _):
        with pytest.raises(ZeroDivisionError), accelerator.dealing():
            _ = 1 // 0
        return accelerator.process_index, accelerator.replicas.mesh_index


def test_a_rank_is_itself_again_after_batches_are_dealt_out(pool: Pool) -> None:
    assert pool.run(4, return_index_after_dealing) == [(rank, rank // 2) for rank in range(4)]


def test_an_accelerator_of_one_process_is_one_mesh_of_one_rank() -> None:
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True)
    model = families.model("qwen3", "attnmesh")
    assert hf.prepare(accelerator, model, None) is model
    assert isinstance(accelerator, MeshAccelerator)
    assert isinstance(accelerator, Accelerator)
    assert accelerator.replicas == Replicas(0, 1, 1, None)
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    assert accelerator.gather(torch.tensor(3.0)).tolist() == [3.0]
    assert accelerator.reduce(torch.tensor(3)).item() == 3


# --- batches ---


@on_each_rank
def deal_batches() -> list[list[int]]:
    with accelerator_of() as (accelerator, _):
        loader = accelerator.prepare_data_loader(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
        return [batch.tolist() for batch in loader]


def test_the_ranks_of_a_mesh_get_the_same_batches(pool: Pool) -> None:
    assert pool.run(4, deal_batches) == [[[0, 1], [4, 5]], [[0, 1], [4, 5]], [[2, 3], [6, 7]], [[2, 3], [6, 7]]]


@on_each_rank
def gather_metrics() -> list[int]:
    """Return the numbers of 5 samples in batches of 2, of which the last is filled up."""
    with accelerator_of() as (accelerator, _):
        loader = accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2))  # type: ignore[arg-type]
        return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


def test_metrics_count_each_sample_once(pool: Pool) -> None:
    assert pool.run(4, gather_metrics) == [[*range(5)]] * 4


class Gathered(NamedTuple):
    """Tensors of one rank of each mesh, and the errors of what has no tensors."""

    x: list[int]
    y: list[list[int]]
    error_of_text: str
    error_of_objects: str


@on_each_rank
def gather_tensors() -> Gathered:
    with accelerator_of() as (accelerator, _):
        own = accelerator.replicas.mesh_index
        found = accelerator.gather({"x": torch.tensor(own), "y": [torch.tensor([[own, 10 * own]])]})
        refused = []
        for data, options in ((["text"], {}), (torch.tensor(1), {"use_gather_object": True})):
            with pytest.raises(errors.KernelError) as caught:
                accelerator.gather_for_metrics(data, **options)
            refused.append(str(caught.value))
        return Gathered(found["x"].tolist(), found["y"][0].tolist(), *refused)


def test_one_rank_of_each_mesh_is_gathered_and_objects_are_refused(pool: Pool) -> None:
    for found in pool.run(4, gather_tensors):
        assert found.x == [0, 1]
        assert found.y == [[0, 0], [1, 10]]
        assert found.error_of_text.startswith("gather_for_metrics: expected tensors, given ")
        assert found.error_of_objects.startswith("gather_for_metrics: expected tensors, given use_gather_object=True")


@on_each_rank
def sum_other_dtypes() -> tuple[Tensor, Tensor]:
    """Return sums of complex and of true and false numbers."""
    with accelerator_of() as (accelerator, _):
        own = accelerator.replicas.mesh_index
        return accelerator.reduce(torch.tensor(1.0 + 2j + own)), accelerator.reduce(torch.tensor([own == 1, False]))


def test_complex_numbers_are_summed_over_meshes_and_flags_stay_flags(pool: Pool) -> None:
    for total, flags in pool.run(4, sum_other_dtypes):
        assert total.item() == 3 + 4j
        assert flags.tolist() == [True, False]


# --- training ---


def loop(mesh: Any, attention: str) -> list[float]:
    """Return the losses and learning rates of a plain loop."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), families.model("qwen3", attention).train()
    if mesh is not None:
        model = hf.prepare(accelerator, model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    loader = torch.utils.data.DataLoader(examples(8), batch_size=2, collate_fn=collate, shuffle=True)  # type: ignore[arg-type]
    torch.manual_seed(3)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    logged = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        tokens = accelerator.gather_for_metrics(batch["attention_mask"].sum()).sum()
        logged += [loss.item(), norm.item(), scheduler.get_last_lr()[0], tokens.item()]
    return logged


@on_each_rank
def run_loop(shape: Shape) -> list[float]:
    with launched():
        return loop(named_mesh(shape, AXES), "attnmesh")


def test_a_loop_with_accelerate_is_that_of_one_process(pool: Pool) -> None:
    forget_accelerate()  # a trainer that stopped between two micro-batches leaves optimizers that do not step
    expected = loop(None, "sdpa")
    for given in pool.run(3, run_loop, Shape(1, 1, 3)):
        assert given == pytest.approx(expected, rel=TRAINED)


class Reduced(NamedTuple):
    """The sums of a float and of a whole number over meshes, and the mean of the float."""

    sum_of_floats: Tensor
    sum_of_ints: Tensor
    mean: Tensor


@on_each_rank
def reduce_over_meshes(data: int, shape: Shape) -> Reduced:
    """Return sums and means over meshes of numbers that ranks of a mesh have alike."""
    with launched():
        from accelerate import Accelerator

        accelerator, mesh = Accelerator(cpu=True), mesh_of(data, shape)
        hf.prepare(accelerator, families.model("qwen3", "attnmesh"), mesh)
        own = 3 + dist.get_rank() // shape.ranks
        sums = accelerator.reduce({"x": torch.tensor(own / 4), "n": [torch.tensor(own)]}, "sum")
        mean = accelerator.reduce(torch.tensor(own / 4), "mean")
        return Reduced(sums["x"], sums["n"][0], mean)


@pytest.mark.parametrize(("data", "x", "n", "mean"), [(1, 0.75, 3, 0.75), (2, 1.75, 7, 0.875)])
def test_an_accelerator_reduces_over_meshes(data: int, x: float, n: int, mean: float, pool: Pool) -> None:
    for given in pool.run(2 * data, reduce_over_meshes, data, Shape(1, 1, 2)):
        assert given.sum_of_floats.item() == x
        assert given.sum_of_ints.item() == n
        assert given.sum_of_ints.dtype == torch.int64
        assert given.mean.item() == mean


@on_each_rank
def train_two_models(shape: Shape) -> list[float]:
    """Return losses of two models that one accelerator prepares, one of them twice."""
    with launched():
        from accelerate import Accelerator

        accelerator, mesh, ids = Accelerator(cpu=True), named_mesh(shape, AXES), prompt(33)
        models = [families.model(family, "attnmesh") for family in ("qwen3", "llama", "qwen3")]
        models[2] = models[0]
        prepared = [hf.prepare(accelerator, model, mesh) for model in models]
        return [model(input_ids=ids, labels=ids).loss.item() for model in prepared]


def test_an_accelerator_prepares_several_models_and_one_twice(pool: Pool) -> None:
    ids = prompt(33)
    first, second = (
        families.model(family, "sdpa")(input_ids=ids, labels=ids).loss.item() for family in ("qwen3", "llama")
    )
    for given in pool.run(2, train_two_models, Shape(1, 1, 2)):
        assert given == pytest.approx([first, second, first], rel=FLOAT32_SUMS)


class AfterAnError(NamedTuple):
    """The error of a batch, and the logits and the loss of the next one, in a loop that goes on."""

    raised: str
    type_of_logits: str
    loss: float


@on_each_rank
def go_on_after_an_error(shape: Shape) -> AfterAnError:
    with launched():
        from accelerate import Accelerator

        model = hf.prepare(Accelerator(cpu=True), families.model("qwen3", "attnmesh"), named_mesh(shape, AXES))
        ids = prompt(33)
        try:
            model(input_ids=ids, labels=ids + 1000)
            raised = "none"
        except errors.ArgumentError as error:
            raised = type(error).__name__
        output = model(input_ids=ids, labels=ids)
        return AfterAnError(raised, type(output.logits).__name__, output.loss.item())


def test_a_loop_goes_on_after_a_batch_whose_call_raised(pool: Pool) -> None:
    ids = prompt(33)
    expected = families.model("qwen3", "sdpa")(input_ids=ids, labels=ids).loss.item()
    for given in pool.run(2, go_on_after_an_error, Shape(1, 1, 2)):
        assert given.raised == "ArgumentError"
        assert given.type_of_logits == "ShardedOutput"
        assert given.loss == pytest.approx(expected, rel=TRAINED)


class Wrapped(NamedTuple):
    """Whether a model is averaged over ranks once it is prepared to be evaluated, and to be trained; and its loss."""

    for_evaluation: bool
    for_training: bool
    loss: float


@on_each_rank
def wrap_models() -> Wrapped:
    with accelerator_of(meshes=1) as (accelerator, model):
        evaluated = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer = torch.optim.SGD(model.parameters())
        trained, _ = accelerator.prepare(evaluated, optimizer)
        ids = prompt(33)
        return Wrapped(
            isinstance(evaluated, DistributedDataParallel),
            isinstance(trained, DistributedDataParallel),
            trained(input_ids=ids, labels=ids).loss.item(),
        )


def test_a_model_that_was_evaluated_is_wrapped_for_training_and_sharded(pool: Pool) -> None:
    ids = prompt(33)
    expected = families.model("qwen3", "sdpa")(input_ids=ids, labels=ids).loss.item()
    for model in pool.run(2, wrap_models):
        assert not model.for_evaluation
        assert model.for_training
        assert model.loss == pytest.approx(expected, rel=FLOAT32_SUMS)


@on_each_rank
def record_learning_rates(meshes: int, shape: Shape) -> list[float] | str:
    """Return the learning rates after steps of a scheduler, or the error of one that cannot be prepared."""
    with accelerator_of(meshes, shape) as (accelerator, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        try:
            scheduler = accelerator.prepare_scheduler(scheduler)
        except errors.KernelError as error:
            return str(error)
        rates = []
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            rates += scheduler.get_last_lr()
        return rates


def test_a_scheduler_of_one_mesh_steps_once_a_step(pool: Pool) -> None:
    assert pool.run(2, record_learning_rates, 1, PAIR) == [[0.5, 0.25, 0.125]] * 2


def test_a_scheduler_of_several_meshes_is_refused(pool: Pool) -> None:
    for message in pool.run(4, record_learning_rates, 2, PAIR):
        assert message.startswith("prepare: expected a scheduler that steps by itself on one mesh, given 2 meshes")


class Loaded(NamedTuple):
    """Whether weights and the random number are those that were saved, that number, and the processes."""

    has_weights: bool
    has_number: bool
    number: float
    processes: int


@on_each_rank
def save_and_load(folder: str) -> Loaded:
    with accelerator_of() as (accelerator, model):
        model = accelerator.prepare(model)
        torch.manual_seed(dist.get_rank())
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()  # the first rank writes the weights
        weight = next(model.parameters())
        before, number = weight.detach().clone(), torch.rand(1)
        with torch.no_grad():
            weight.zero_()
        accelerator.load_state(folder)
        has_number = torch.equal(torch.rand(1), number)
        return Loaded(torch.equal(weight, before), has_number, number.item(), accelerator.num_processes)


def test_each_rank_saves_and_loads_its_part_of_a_state(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(4, save_and_load, str(tmp_path))
    assert all(loaded.has_weights for loaded in answers)
    assert all(loaded.has_number for loaded in answers)
    assert len({loaded.number for loaded in answers}) == 4, "ranks have random numbers of their own"
    assert {loaded.processes for loaded in answers} == {2}
    assert sorted(path.name for path in tmp_path.glob("random_states_*")) == [
        f"random_states_{n}.pkl" for n in range(4)
    ]


# --- refusals ---


@on_each_rank
def catch_error_of_other_layout() -> str:
    with accelerator_of(meshes=1) as (accelerator, model):
        with pytest.raises(errors.ArgumentError) as caught:
            hf.prepare(accelerator, model, named_mesh(PAIR, AXES), "auto")
        return str(caught.value)


def test_a_second_model_has_the_mesh_layout_and_exchange_of_the_first(pool: Pool) -> None:
    for message in pool.run(2, catch_error_of_other_layout):
        assert message.startswith("prepare: expected the mesh, layout and exchange of the accelerator's first model")


@on_each_rank
def catch_error_of_split_batches() -> str:
    from accelerate.utils import DataLoaderConfiguration

    with (
        pytest.raises(errors.KernelError) as caught,
        accelerator_of(meshes=1, dataloader_config=DataLoaderConfiguration(split_batches=True)),
    ):
        pass
    return str(caught.value)


def test_batches_that_accelerate_splits_are_refused(pool: Pool) -> None:
    for message in pool.run(2, catch_error_of_split_batches):
        assert message.startswith(
            "on_mesh: expected data that each rank reads, given dispatch_batches or split_batches"
        )


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "tp_size"])
def test_sizes_of_accelerate_are_refused_unless_they_are_one(name: str) -> None:
    check_parallelism(None)
    check_parallelism(SimpleNamespace(**{name: 1}))
    check_parallelism(SimpleNamespace(**{name: None}))
    with pytest.raises(errors.KernelError, match=rf"no ParallelismConfig\({name}=\) beside a mesh, given 2"):
        check_parallelism(SimpleNamespace(**{name: 2}))
