"""A generation that continues from a checkpoint gives the tokens of an uninterrupted one, on any ranks."""

import copy
import json
import multiprocessing as mp
import os
import signal
import sys
import warnings
from dataclasses import replace
from errno import ENOSPC
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import run as torchrun
from transformers import MaxLengthCriteria, SynthIDTextWatermarkingConfig

from attnmesh import hf
from attnmesh.__main__ import main
from attnmesh.errors import InputError, MeshError, StoreError
from attnmesh.hf.options import GenerationSettings
from attnmesh.mesh.shapes import AXES, Shape
from attnmesh.store import save_layers
from attnmesh.store.manifest import MANIFEST
from tests.support.models import families
from tests.support.models.recurrent import model_of
from tests.support.process.command import run_main
from tests.support.ranks.pool import Pool, on_each_rank
from tests.support.training.trainers import tokenizer
from tests.support.truth.mesh_problems import named_mesh

NEW = 22


def prompt(length: int = 45) -> Tensor:
    return torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(1))


@on_each_rank
def generate_with_checkpoints(
    folder: Path | None, shape: tuple[int, int, int], new: int, sample: bool, **more: Any
) -> list[int]:
    """Return the new tokens, with a checkpoint every four tokens."""
    mesh = named_mesh(Shape(*shape), AXES) if Shape(*shape).ranks > 1 else None
    torch.manual_seed(5)
    options: dict[str, Any] = {"max_new_tokens": new, "do_sample": sample, **more}
    if sample:
        options |= {"temperature": 1.3, "top_k": 30}
    if folder is not None:
        options["checkpoint"] = hf.Checkpoint(folder, every=4)
    ids = options.pop("ids", prompt())
    output = hf.generate(families.model("llama", "attnmesh"), ids, mesh=mesh, **options)
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("before", "after", "sample"),
    [
        pytest.param(*place, sample, marks=[] if sample == bool(number % 2) else pytest.mark.long)
        for number, place in enumerate([((1, 1, 1), (1, 1, 1)), ((1, 2, 2), (1, 1, 2)), ((1, 1, 2), (1, 3, 1))])
        for sample in (False, True)
    ],
)
def test_continued_tokens_are_those_of_an_uninterrupted_run(
    pool: Pool, tmp_path: Path, before: tuple[int, int, int], after: tuple[int, int, int], sample: bool
) -> None:
    (whole,) = pool.run(1, generate_with_checkpoints, None, (1, 1, 1), NEW, sample)
    assert len(set(whole)) > 3
    for length in (10, 14):
        for tokens in pool.run(Shape(*before).ranks, generate_with_checkpoints, tmp_path, before, length, sample):
            assert tokens == whole[:length]
    report = json.loads((tmp_path / MANIFEST).read_text())
    assert report["length"] == 45 + 12 - 1, "the cache lacks the last saved token"
    for tokens in pool.run(Shape(*after).ranks, generate_with_checkpoints, tmp_path, after, NEW, sample):
        assert tokens == whole
    (again,) = pool.run(1, generate_with_checkpoints, tmp_path, (1, 1, 1), 5, sample)
    assert again == whole[:5], "the checkpoint has more tokens than the call"


@on_each_rank
def continue_with_states(folder: Path) -> list[list[int]]:
    """Return the new tokens of a model with convolutions, and those of a call that goes on after a checkpoint."""
    model, ids, mesh = model_of("lfm2"), prompt(), named_mesh(Shape(1, 1, 3), AXES)
    outputs = [
        hf.generate(model, ids, mesh=mesh, max_new_tokens=new, do_sample=False, checkpoint=hf.Checkpoint(path, every=4))
        for path, new in ((folder / "whole", 9), (folder / "parts", 4), (folder / "parts", 9))
    ]
    return [output[0, ids.shape[1] :].tolist() for output in outputs]


def test_states_are_continued_on_any_ranks(pool: Pool, tmp_path: Path) -> None:
    """A prompt leaves two tokens to the first step, and a checkpoint has all tokens but one."""
    for whole, first, continued in pool.run(3, continue_with_states, tmp_path):
        assert first == whole[:4]
        assert continued == whole


@on_each_rank
def record_lengths_after_interrupted_prefill(folder: Path) -> list[int]:
    """Return the lengths of forward passes that continue a prefill, which was interrupted after two of three chunks."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    model, ids = families.model("llama", "attnmesh"), prompt(130)
    checkpoint = hf.Checkpoint(folder)
    cache = hf.ShardedCache(model.config, mesh)
    assert torch.equal(checkpoint.begin(model, ids, cache, GenerationSettings(model, {"do_sample": False})), ids)
    hf.prefill(model, ids[:, :65], cache, chunk_size=32, after=lambda n: checkpoint.save(cache, ids[:, :n]))
    checkpoint.wait()
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda _, __, more: lengths.append(more["input_ids"].shape[1]), with_kwargs=True)
    made = hf.generate(model, ids, mesh=mesh, max_new_tokens=3, do_sample=False, checkpoint=hf.Checkpoint(folder))
    alone = hf.generate(model, ids, mesh=mesh, max_new_tokens=3, do_sample=False)
    assert torch.equal(made, alone)
    return lengths[: len(lengths) - 4]


def test_a_prompt_is_not_computed_twice(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, record_lengths_after_interrupted_prefill, tmp_path)
    assert sum(first[:-2]) + sum(second[:-2]) == 67, "the rest of the prompt, and the last token on both"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another prompt": ({"ids": prompt(46)}, "a folder of this model, prompt and options, given another prompt in "),
    "sampled": ({"do_sample": True}, "this model, prompt and options, given other options and another seed in "),
    "never twice": ({"no_repeat_ngram_size": 3}, "this model, prompt and options, given other options in "),
    "by the prompt": ({"encoder_repetition_penalty": 1.5}, "be continued, given encoder_repetition_penalty=1.5. Fix"),
    "as a dict": ({"return_dict_in_generate": True}, "options that can be continued, given return_dict_in_gener"),
    "beams": ({"num_beams": 2}, "one sequence, given 1 of 2 beams or samples"),
    "several": ({"ids": prompt().expand(2, -1)}, "one sequence, given 2 of 1 beams or samples"),
    "watermark": (
        {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=5)},
        "watermarking_config: expected a watermark that can be continued, given one of SynthIDText. Fix: pass a Water",
    ),
    "stopping": ({"stopping_criteria": [len]}, "options that can be continued, given stopping_crit"),
    "looked up": ({"prompt_lookup_num_tokens": 3}, "options that can be continued, given prompt_lookup_num_tokens="),
    "early exit": ({"assistant_early_exit": 1}, "options that can be continued, given assistant_early_exit="),
    "a name": ({"checkpoint": "folder"}, "generate checkpoint: expected an hf.Checkpoint, given str. Fix: pass hf.Ch"),
    "a path": ({"checkpoint": Path("folder")}, "generate checkpoint: expected an hf.Checkpoint, given PosixPath"),
    "a number": ({"checkpoint": 5}, "generate checkpoint: expected an hf.Checkpoint, given int"),
    "no name": ({"checkpoint": False}, "generate checkpoint: expected an hf.Checkpoint, given bool"),
    "padding": ({"attention_mask": torch.arange(45)[None].gt(3).long()}, "a prompt without padding, given padding"),
}


@on_each_rank
def catch_refusal(folder: Path, more: dict[str, Any]) -> str:
    """Return the error of a call with these options."""
    given = dict(more)
    sample = given.pop("do_sample", False)
    has_checkpoint = "checkpoint" in given
    try:
        generate_with_checkpoints(None if has_checkpoint else folder, (1, 1, 2), 6, sample, **given)
    except InputError as error:
        return str(error)
    return "nothing"


def test_calls_that_cannot_be_continued_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, generate_with_checkpoints, tmp_path, (1, 1, 2), 6, False)
    for name, (more, expected) in REFUSED.items():
        one, other = pool.run(2, catch_refusal, tmp_path, more)
        assert one == other, name
        assert expected in one, name
    with pytest.raises(InputError, match="Checkpoint every: expected a whole number, 1 or more, given 0"):
        hf.Checkpoint(tmp_path, every=0)


@on_each_rank
def generate_on_a_full_disk(folder: Path, room: int) -> tuple[list[int], list[str]]:
    """Return the new tokens and the warnings, on a rank. The disk of the last rank has room for some files."""
    left = [room]
    write = save_layers.link_or_write

    def link_or_write(*arguments: Any) -> Any:
        left[0] -= dist.get_rank() == 1
        if left[0] < 0:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(save_layers, "link_or_write", link_or_write)
        made = generate_with_checkpoints(folder, (1, 1, 2), NEW, False)
    return made, [str(each.message) for each in caught if "checkpoint" in str(each.message)]


def test_a_full_disk_does_not_end_the_generation(pool: Pool, tmp_path: Path) -> None:
    (whole,) = pool.run(1, generate_with_checkpoints, None, (1, 1, 1), NEW, False)
    for room in (0, 3):
        (first, told), (second, untold) = pool.run(2, generate_on_a_full_disk, tmp_path / str(room), room)
        assert first == second == whole
        assert len(told) == 1
        assert "generation continues without a new checkpoint, and tries again later. save: expected a f" in told[0]
        assert "No space left on device" in told[0]
        assert not untold
        assert (tmp_path / str(room) / MANIFEST).exists() == (room > 0), "the checkpoint before stays"
        assert pool.run(2, generate_with_checkpoints, tmp_path / str(room), (1, 1, 2), NEW, False) == [whole, whole]


@on_each_rank
def catch_error_of_unequal_every(folder: Path) -> str:
    """Return the error of ranks that would save after different tokens."""
    mesh = named_mesh(Shape(1, 1, 2), AXES)
    checkpoint = hf.Checkpoint(folder, every=4 + dist.get_rank())
    with pytest.raises(InputError) as raised:
        hf.generate(families.model("llama", "attnmesh"), prompt(), mesh=mesh, max_new_tokens=6, checkpoint=checkpoint)
    return str(raised.value)


def test_ranks_that_checkpoint_at_other_intervals_raise_alike(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, catch_error_of_unequal_every, tmp_path)
    assert one == other
    assert "expected the same call on every rank, given:\n    ranks  checkpoint\n" in one


def run_agent(*words: str) -> None:
    """Run torchrun's agent for two ranks, which it forks: it has imported what they need."""
    options = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m"]
    config, _, _ = torchrun.config_from_args(torchrun.get_args_parser().parse_args([*options, "attnmesh"]))
    torchrun.elastic_launch(replace(config, start_method="fork"), run_rank)(*words)


def run_rank(folder: str, *words: str) -> None:
    """Run the command on a rank of torchrun. The second rank is killed at its fourth save."""
    for number, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        saves, save = count(1), hf.Checkpoint.save
        hf.Checkpoint.save = lambda *given: save(*given) if next(saves) < 4 else os.kill(os.getpid(), signal.SIGKILL)
    sys.argv = ["attnmesh", *words]
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_torchrun_goes_on_after_a_rank_is_killed(again: bool, tmp_path: Path) -> None:
    """The tokens are those of an uninterrupted run; also when it is run again, on fewer ranks."""
    model = tmp_path / "model"
    families.model("llama", "sdpa").save_pretrained(model)
    tokenizer().save_pretrained(model)
    text = " ".join(f"w{3 + number % 7}" for number in range(45))
    command = ["generate", "--model", str(model), "--prompt", text, "--json", "--max-new-tokens", "32"]
    kept = ["--checkpoint", str(tmp_path / "kept"), "--every", "6"]
    agent = mp.get_context("forkserver").Process(target=run_agent, args=(str(tmp_path), *command, *kept))
    agent.start()
    agent.join()
    error = (tmp_path / "error").read_text()
    assert agent.exitcode == 0, error
    assert "going on from" in error
    whole = json.loads(run_main(*command).stdout)["tokens"]
    assert json.loads((tmp_path / "out").read_text())["tokens"] == whole
    if again:
        done = run_main(*command, *kept)
        assert json.loads(done.stdout)["tokens"] == whole
        assert "going on from" in done.stderr


@on_each_rank
def find_where_it_stops(length: int) -> int:
    """Return the length at which each rank's criterion stops."""
    model, mesh = families.model("llama", "attnmesh"), named_mesh(Shape(1, 1, 2), AXES)
    criteria = [MaxLengthCriteria(length)]
    made = hf.generate(model, prompt(), mesh=mesh, max_new_tokens=NEW, do_sample=False, stopping_criteria=criteria)
    return made.shape[1]


def test_stopping_criteria_of_the_caller_stop_every_rank(pool: Pool) -> None:
    assert pool.run(2, find_where_it_stops, 51) == [51, 51]


def used_twice(folder: Path) -> dict[str, bool]:
    """Use one checkpoint for two prompts, then without max_new_tokens. Return what is right."""
    model, checkpoint = families.model("llama", "attnmesh"), hf.Checkpoint(folder / "a", every=4)
    first = hf.generate(model, prompt(), max_new_tokens=9, do_sample=False, checkpoint=checkpoint)
    with pytest.raises(InputError, match="another prompt in"):
        hf.generate(model, prompt(50), max_new_tokens=9, do_sample=False, checkpoint=checkpoint)
    again = hf.generate(model, prompt(), max_new_tokens=9, do_sample=False, checkpoint=checkpoint)
    right = {"again": torch.equal(first, again)}
    for more in ({}, {"max_length": 60}):
        alone = hf.generate(model, prompt(), do_sample=False, **more)
        for turn in ("first", "second"):
            kept = hf.Checkpoint(folder / str(more), every=4)
            each = hf.generate(model, prompt(), do_sample=False, checkpoint=kept, **more)
            right[f"{turn} with {more}"] = torch.equal(alone, each)
    return right


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_another_configuration_is_refused(tmp_path: Path) -> None:
    ids, options = prompt(), {"max_new_tokens": 6, "do_sample": False}
    for name, other in (("rope", "another model"), ("suppressed", "other options")):
        model = copy.deepcopy(families.model("llama", "attnmesh"))
        hf.generate(model, ids, checkpoint=hf.Checkpoint(tmp_path / name, every=2), **options)
        if name == "rope":
            model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 77.0}
        else:
            model.generation_config.suppress_tokens = [5, 6]
        with pytest.raises(StoreError, match=f"this model, prompt and options, given {other} in"):
            hf.generate(model, ids, checkpoint=hf.Checkpoint(tmp_path / name), **options)


@on_each_rank
def catch_error_of_other_weights(folder: Path) -> str:
    """Return the error of ranks with different weights."""
    model, mesh = copy.deepcopy(families.model("llama", "attnmesh")), named_mesh(Shape(1, 1, 2), AXES)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
    try:
        hf.generate(model, prompt(), mesh=mesh, max_new_tokens=4, do_sample=False, checkpoint=hf.Checkpoint(folder))
    except MeshError as error:
        return str(error)
    return "nothing"


def test_ranks_with_different_models_raise(pool: Pool, tmp_path: Path) -> None:
    one, other = pool.run(2, catch_error_of_other_weights, tmp_path)
    assert one == other
    assert one.startswith("generate checkpoint: expected the same call on every rank, given:\n    ranks  model\n")


@pytest.mark.parametrize("tokens", [torch.zeros(60), torch.zeros(1, 60), torch.zeros(1, 3, dtype=torch.int64)])
def test_invalid_saved_tokens_are_refused(tmp_path: Path, tokens: torch.Tensor) -> None:
    model, checkpoint = families.model("llama", "attnmesh"), hf.Checkpoint(tmp_path, every=2)
    hf.generate(model, prompt(), max_new_tokens=6, do_sample=False, checkpoint=checkpoint)
    cache = hf.ShardedCache(model.config)
    cache.restore(tmp_path)
    cache.save(tmp_path, more={"tokens": tokens}, note=checkpoint.note)
    checkpoint = hf.Checkpoint(tmp_path)
    with pytest.raises(StoreError, match="generate checkpoint: expected the tokens of "):
        hf.generate(model, prompt(), max_new_tokens=6, do_sample=False, checkpoint=checkpoint)
    with pytest.raises(StoreError, match="given another prompt in "):  # and not the tokens of the call before
        hf.generate(model, prompt() + 1, max_new_tokens=6, do_sample=False, checkpoint=checkpoint)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_a_checkpoint_can_be_used_again(tmp_path: Path) -> None:
    right = used_twice(tmp_path)
    assert right == dict.fromkeys(right, True)


def continues_after_interrupted_layer(length: int) -> bool:
    """Interrupt a forward pass in the second layer. Return True if the continuation gives the right tokens."""
    model, ids = families.model("llama", "attnmesh"), prompt()
    cache = hf.ShardedCache(model.config)
    hf.prefill(model, ids, cache)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        hf.generate(model, ids, cache=cache, max_new_tokens=length, do_sample=False)
    handle.remove()
    assert len({layer.kv_cache.length for layer in cache.layers}) > 1
    made = hf.generate(model, cache.tokens, cache=cache, max_new_tokens=length, do_sample=False)
    return torch.equal(made, hf.generate(model, ids, max_new_tokens=length, do_sample=False))


def test_layers_of_different_lengths_are_truncated() -> None:
    assert continues_after_interrupted_layer(8)
