"""Many processes: noise that is shared or each rank's own, sharded weights, checkpoints of both.

Real processes carry out the plan of ``distributed_worker`` once for this file; a test looks at what
one check found on each rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neuvar import NVRM
from neuvar.noise import Draw, standard_noise, whole_slot
from tests import distributed_worker as worker
from tests.conftest import PATIENCE

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Found:
    """What a check found, by rank."""

    how: dict[str, Any]
    ranks: list[Any]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, "-m", worker.__name__, str(folder)]
    root = Path(worker.__file__).parents[1]
    with subprocess.Popen(command, cwd=root, start_new_session=True) as process:
        try:
            process.wait(timeout=PATIENCE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    return {
        world: [torch.load(folder / f"reports-{world}-{rank}.pt") for rank in range(world)]
        for world in worker.WORLDS
    }


@pytest.fixture
def found(request, reports) -> Found:
    check, how, world = request.param
    here = [rank[worker.label(check, how)] for rank in reports[world]]
    if errors := [report["error"] for report in here if "error" in report]:
        pytest.fail("\n".join(errors), pytrace=False)
    return Found(how, [report["found"] for report in here])


def cases(check: Callable[..., Any], **wanted: Any) -> pytest.MarkDecorator:
    """Look at each case of a check that is planned with the wanted options (None: not given)."""
    planned = [
        pytest.param((check, how, world), id=f"{world}, {worker.label(check, how)}")
        for other, how, worlds in worker.PLAN
        for world in sorted(worlds)
        if other is check and all(how.get(key) == value for key, value in wanted.items())
    ]
    assert planned
    return pytest.mark.parametrize("found", planned, indirect=True)


def same(first: Any, second: Any) -> bool:
    """Whether dicts and lists of tensors and numbers are equal to the bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, Tensor) else bool(first == second)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


# Data parallel: the same noise on all ranks, or each rank's own.


@cases(worker.different_data, ranks="shared")
def test_shared_noise_and_clean_weights_are_the_same_on_all_ranks(found):
    first, *others = found.ranks
    for other in others:
        for what in ("perturbed", "clean", "noise"):
            assert same(other[what], first[what]), what


@cases(worker.different_data, ranks="per_rank", mode="exact", sampler="table", known=True)
def test_clean_weights_of_a_known_model_are_the_same_on_all_ranks(found):
    first, *others = found.ranks
    for other in others:
        assert same(other["clean"], first["clean"])
        assert same(other["perturbed"], first["clean"])


@cases(worker.different_data, ranks="per_rank", known=None)
def test_own_noise_differs_between_ranks_and_clean_weights_do_not(found):
    first, *others = found.ranks
    for other in others:
        assert same(other["clean"], first["clean"])
        for what in ("perturbed", "noise"):
            for mine, theirs in zip(other[what], first[what], strict=True):
                assert not torch.isclose(mine, theirs).any(), what


@cases(worker.different_data, ranks="per_rank", known=None)
def test_rank_0_has_the_noise_of_a_single_process(found):
    single = worker.same_data(Path(), wrap="plain", sampler=found.how["sampler"])
    assert same(found.ranks[0]["noise"], single["noise"])


@cases(worker.different_data)
def test_the_gradient_is_the_mean_of_those_at_the_weights_of_each_rank(found):
    ranks = range(len(found.ranks))
    noisy = ranks if found.how["ranks"] == "per_rank" else [0 for _ in ranks]
    gradients, theta = by_hand(noisy, found.how["sampler"])
    for rank in found.ranks:
        assert_close(rank["gradients"], gradients)
        assert_close(rank["clean"], theta)


def by_hand(noisy: Sequence[int], sampler: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Mean gradients of all steps and the weights they lead to; ``noisy`` says whose noise."""
    model, found = worker.network(), []
    theta = list(model.parameters())
    inner = worker.INNERS["momentum"](theta)
    for step in range(worker.STEPS):
        parts = []
        for part, rank in enumerate(noisy):
            twin, start = worker.network(), 0
            draw = Draw(step, seed=worker.SETTINGS["seed"], sampler=sampler, rank=rank)
            for number, (p, q) in enumerate(zip(twin.parameters(), theta, strict=True)):
                slot = whole_slot(tuple(q.shape), number=number, start=start)
                z = standard_noise(slot, draw).double() if step else torch.zeros_like(q)
                p.data = q.detach() + worker.SETTINGS["b"] * z
                start += q.numel()
            worker.backward(twin, step, part)
            parts.append([p.grad for p in twin.parameters()])
        found.append([torch.stack(of_one).mean(0) for of_one in zip(*parts, strict=True)])
        for q, gradient in zip(theta, found[-1], strict=True):
            q.grad = gradient
        inner.step()
    return found, [q.detach() for q in theta]


def test_own_noise_is_refused_where_it_cannot_be():
    inner = worker.INNERS["sgd"](worker.network().parameters())
    with pytest.raises(ValueError, match="process group"):
        NVRM(inner, b=0.1, ranks="per_rank")
    with pytest.raises(ValueError, match="mode='exact'"):
        NVRM(inner, b=0.1, ranks="per_rank", mode="replay")


@cases(worker.refused)
def test_what_sharded_weights_cannot_have_is_refused(found):
    for own_noise, own_scale in found.ranks:
        assert "is sharded" in own_noise
        assert "b='auto' does not support sharded parameters" in own_scale


@cases(worker.controlled)
def test_a_scale_that_sets_itself_is_the_same_on_all_ranks(found):
    first = found.ranks[0]
    assert len(set(first["scales"])) == 5  # the start, and four updates
    for rank in found.ranks:
        assert rank["scales"] == first["scales"]
        assert same(rank["clean"], first["clean"])


# Sharded weights.


@cases(worker.same_data)
def test_sharded_training_equals_that_of_a_single_process(found):
    single = worker.same_data(Path(), **found.how | {"wrap": "plain"})
    for rank in found.ranks:
        if found.how.get("known"):
            assert_close(rank["clean"], single["clean"])
            assert same(rank["perturbed"], rank["clean"])
        else:
            assert same(rank["noise"], single["noise"])
            assert_close(rank, single)


@cases(worker.evaluated)
def test_evaluation_and_training_each_see_their_own_weights(found):
    single = worker.evaluated(Path(), "plain")
    for rank in found.ranks:
        assert_close(rank, single)


@cases(worker.changed)
def test_weights_changed_while_perturbed_are_refused(found):
    for complaint in found.ranks:
        assert "was changed while it carried noise" in complaint


@cases(worker.at_rest)
def test_a_known_model_is_clean_at_rest_and_in_the_midst_of_a_step(found):
    kind = "DTensor" if "fsdp" in found.how["wrap"] else "Tensor"
    for rank in found.ranks:
        assert rank["kinds"] == [kind]
        assert same(rank["state"], rank["later"])
        assert same(rank["mid"], rank["theta"]) or found.how["mode"] == "replay"
        assert_close(rank["mid"], rank["theta"])
        assert_close(rank["evaluated"], rank["expected"])
        assert same(rank["later"], rank["undisturbed"])


# Checkpoints.


@cases(worker.checkpoint)
def test_a_distributed_checkpoint_resumes_to_the_bit(found):
    for rank in found.ranks:
        assert same(rank["resumed"], rank["went on"])
        assert_close(rank["resumed"], rank["never saved"])
        if found.how.get("mode", "exact") == "exact":
            assert same(rank["resumed"], rank["never saved"])


@cases(worker.resharded)
def test_a_distributed_checkpoint_resumes_on_another_number_of_ranks(found):
    single = worker.never_saved(wrap="plain", inner=found.how["inner"], mode=found.how["mode"])
    for rank in found.ranks:
        assert_close(rank, single)


@cases(worker.gathered)
def test_a_gathered_state_resumes_to_the_bit(found):
    for rank in found.ranks:
        assert same(rank["resumed"], rank["went on"])


@cases(worker.materialised)
def test_asking_for_the_state_moves_no_weight_and_draws_no_noise(found):
    for rank in found.ranks:
        for moment in rank["moments"]:
            assert same(moment["after"], moment["before"])
        assert same(rank["went on"], rank["never asked"])


@cases(worker.from_rank_0)
def test_every_rank_resumes_from_what_rank_0_saved(found):
    first, *others = found.ranks
    for rank in found.ranks:
        assert same(rank["resumed"], rank["went on"])
    for other in others:
        assert same(other["resumed"]["clean"], first["resumed"]["clean"])
        assert not same(other["resumed"]["perturbed"], first["resumed"]["perturbed"])
