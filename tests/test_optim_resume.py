"""A run that is killed and resumed ends like one that never stopped, to the bit."""

from __future__ import annotations

import copy
import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neuvar import NVRM, NVRMSGD, NVRMAdam
from tests.toy import backward, batch, clean, network, same, train, weights

modes = pytest.mark.parametrize("mode", ["exact", "replay"])


class Run:
    """Training with accumulation over three parts, a scaler that skips, and a scheduler."""

    PARTS, SKIPPED = 3, (4, 11, 37)

    def __init__(self, mode, sampler="table", seed=0):
        self.model = network(seed)
        inner = torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=0.01)
        self.optimizer = NVRM(inner, b=0.05, mode=mode, sampler=sampler)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 60)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.part = 0

    def advance(self):
        """Do one part of a batch; after the last one, try a step."""
        step, k = divmod(self.part, self.PARTS)
        self.part += 1
        x, y = batch(self.part)
        self.scaler.scale((self.model(x) - y).square().mean()).backward()
        if k < self.PARTS - 1:
            self.optimizer.resample(antithetic=k % 2 == 0)
            return
        if step in self.SKIPPED:
            self.model[0].bias.grad[0] = math.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def save(self):
        """Everything, as a user would write it, to a file."""
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "gradients": [p.grad for p in self.model.parameters()],
            "part": self.part,
        }
        torch.save(state, file)
        file.seek(0)
        return file

    def load(self, file):
        """Take it all up in a new process."""
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        for p, gradient in zip(self.model.parameters(), state["gradients"], strict=True):
            p.grad = gradient
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.part = state["part"]
        return self


def advanced(run, parts):
    while run.part < parts:
        run.advance()
    return run


@modes
@pytest.mark.parametrize(
    ("when", "sampler"),
    [("perturbed", "table"), ("clean", "table"), ("eval", "table"), ("perturbed", "fresh")],
)
def test_killed_at_each_of_fifty_steps(mode, when, sampler):
    """Each time at another place in the step: before it, or within its accumulation.

    A resumed run goes on for five steps, every tenth one to the end. It never deviates.
    """
    steps = 50
    end = (steps + 1) * Run.PARTS
    whole, expected = Run(mode, sampler), {}
    for part in range(1, end + 1):
        advanced(whole, part)
        expected[part] = weights(whole.model), clean(whole.model, whole.optimizer)
    run = Run(mode, sampler)
    for step in range(steps):
        advanced(run, step * Run.PARTS + step % Run.PARTS)
        if when == "clean":
            with run.optimizer.denoised():
                file = run.save()
        elif when == "eval":
            run.optimizer.eval()
            file = run.save()
            run.optimizer.train()
        else:
            file = run.save()
        resumed = Run(mode, sampler, seed=99).load(file)
        last = end if step % 10 == 0 else min(end, resumed.part + 5 * Run.PARTS)
        while resumed.part < last:
            resumed.advance()
            found = weights(resumed.model), clean(resumed.model, resumed.optimizer)
            assert same(found[0], expected[resumed.part][0]), step
            assert same(found[1], expected[resumed.part][1]), step


@modes
def test_model_and_optimizer_may_be_saved_one_clean_one_perturbed(mode):
    for model_clean in (False, True):
        run = advanced(Run(mode), 20)
        state = {"optimizer": run.optimizer.state_dict()}
        if model_clean:
            with run.optimizer.denoised():
                state["model"] = {k: v.clone() for k, v in run.model.state_dict().items()}
        else:
            state["model"] = {k: v.clone() for k, v in run.model.state_dict().items()}
            with run.optimizer.denoised():
                state["optimizer"] = run.optimizer.state_dict()
        if mode == "replay" and not model_clean:
            continue  # refused, see below
        other = Run(mode, seed=5)
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        assert same(clean(other.model, other.optimizer), clean(run.model, run.optimizer))
        assert same(weights(other.model), weights(run.model))


@modes
@pytest.mark.parametrize("model_clean", [False, True])
def test_loading_while_denoised_gives_the_clean_weights(mode, model_clean):
    run = advanced(Run(mode), 20)
    state, theta = run.optimizer.state_dict(), clean(run.model, run.optimizer)
    other = Run(mode, seed=5)
    with other.optimizer.denoised():
        for p, value in zip(
            other.model.parameters(), theta if model_clean else weights(run.model), strict=True
        ):
            p.data.copy_(value)
        other.optimizer.load_state_dict(state)
        assert same(weights(other.model), theta)
    assert same(weights(other.model), weights(run.model))


@pytest.mark.parametrize(
    "drawn", [None, 3, (1, 1), (1, 1, "pink", 0, "table", 0), (1, 1, "uniform", 0, "dice", 0)]
)
def test_a_broken_record_gets_a_sentence(drawn):
    run = advanced(Run("exact"), 20)
    state, noisy = run.optimizer.state_dict(), weights(run.model)
    state["param_groups"][0]["drawn"] = drawn
    with pytest.raises(ValueError, match=r"is not a valid draw|noise must be one of"):
        run.optimizer.load_state_dict(state)
    assert same(weights(run.model), noisy)


def test_replay_refuses_noisy_weights_with_a_clean_state():
    run = advanced(Run("replay"), 20)
    noisy = {k: v.clone() for k, v in run.model.state_dict().items()}
    with run.optimizer.denoised():
        state = run.optimizer.state_dict()
    other = Run("replay", seed=5)
    other.model.load_state_dict(noisy)
    with pytest.raises(ValueError, match="holds neither the clean nor the perturbed weights"):
        other.optimizer.load_state_dict(state)


@modes
def test_loading_its_own_state_changes_nothing(mode):
    model = network()
    optimizer = NVRMAdam(model.parameters(), b=0.05, mode=mode)
    for step in range(4):
        before, record = weights(model), optimizer.param_groups[0]["drawn"]
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(weights(model), before)
        assert optimizer.param_groups[0]["drawn"] == record
        optimizer.eval()
        theta = weights(model)
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(weights(model), theta)
        optimizer.train()
        assert same(weights(model), before)
        train(model, optimizer, [step])


@modes
def test_other_weights_are_refused_and_nothing_changes(mode):
    run = advanced(Run(mode), 20)
    state = run.optimizer.state_dict()
    other = Run(mode, seed=1)
    before = weights(other.model)
    with pytest.raises(ValueError, match=r"parameter 0 of shape .7, 5. holds neither"):
        other.optimizer.load_state_dict(state)
    assert same(weights(other.model), before)
    assert not other.optimizer.inner.state
    with other.optimizer.denoised():
        other.optimizer.load_state_dict(state)
        assert same(weights(other.model), before)
    assert not same(weights(other.model), before)
    for found, value in zip(clean(other.model, other.optimizer), before, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)


@modes
def test_going_back_in_the_same_process(mode):
    """Model first, then optimizer, while other noise is on."""
    run = advanced(Run(mode), 10)
    file = run.save()
    noisy, theta = weights(run.model), clean(run.model, run.optimizer)
    advanced(run, 30).load(file)
    assert same(weights(run.model), noisy)
    assert same(clean(run.model, run.optimizer), theta)


@modes
def test_an_untrained_state_leaves_the_clean_weights(mode):
    """Loaded over noise without the weights of its moment, it takes noise off, not in."""
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.05, mode=mode)
    start = optimizer.state_dict()
    train(model, optimizer, range(5))
    theta = clean(model, optimizer)
    optimizer.load_state_dict(start)
    assert same(weights(model), theta)


def test_states_of_others_get_a_sentence():
    model = network()
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.05)
    train(model, optimizer, range(2))
    noisy = weights(model)
    larger = NVRMSGD([*network().parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1, b=0.1)
    other = network()
    replay = NVRMSGD(other.parameters(), lr=0.1, b=0.05, mode="replay")
    train(other, replay, range(2))
    for state, sentence in (
        (torch.optim.SGD(network().parameters()).state_dict(), "is not one of NVRMSGD"),
        (larger.state_dict(), r"has groups of \[5\] parameters, the optimizer of \[4\]"),
        (replay.state_dict(), "it was not saved with mode='exact'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            optimizer.load_state_dict(state)
    assert same(weights(model), noisy)
    wide = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    other = NVRMSGD(wide.parameters(), lr=0.1, b=0.05)
    before = weights(wide)
    with pytest.raises(ValueError, match=r"parameter 0 of shape .8, 5. holds neither"):
        other.load_state_dict(optimizer_state(network()))
    assert same(weights(wide), before)


def optimizer_state(model):
    optimizer = NVRMSGD(model.parameters(), lr=0.1, b=0.05)
    train(model, optimizer, range(2))
    return optimizer.state_dict()


def test_a_plain_optimizers_state_can_be_taken_up():
    model = network()
    plain = torch.optim.Adam(model.parameters())
    train(model, plain, range(3))
    optimizer = NVRMAdam(model.parameters(), b=0.05)
    optimizer.inner.load_state_dict(plain.state_dict())
    train(model, optimizer, range(3, 5))
    assert optimizer.inner.state[model[0].weight]["step"] == 5
    assert optimizer.param_groups[0]["b"] == 0.05
    assert not same(weights(model), clean(model, optimizer))


VICTIMS = """
import os, signal, sys, traceback
from pathlib import Path
import torch._dynamo  # otherwise the first optimizer of each fork would import it
from tests.test_optim_resume import Run

def work(mode, folder, end):
    run = Run(mode)
    if (folder / "run.pt").exists():
        run.load(folder / "run.pt")
    first = run.part
    while run.part < end:
        run.advance()
        (folder / "new.pt").write_bytes(run.save().getvalue())
        os.replace(folder / "new.pt", folder / "run.pt")
        if run.part == first + 17:
            os.kill(os.getpid(), signal.SIGKILL)

for mode in ("exact", "replay"):
    for _ in range(3):
        if (pid := os.fork()) == 0:
            try:
                work(mode, Path(sys.argv[1]) / mode, int(sys.argv[2]))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        print(mode, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder for each mode, where three processes worked in turn, and how each of them ended.

    They are forks of one process that has only imported what they need, because that takes seconds.
    """
    folder = tmp_path_factory.mktemp("killed")
    codes = {"exact": [], "replay": []}
    for mode in codes:
        (folder / mode).mkdir()
    command = [sys.executable, "-c", VICTIMS, str(folder), "50"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        mode, code = line.split()
        codes[mode].append(int(code))
    return folder, codes


@pytest.mark.slow
@modes
def test_killed_for_real(mode, killed):
    folder, codes = killed
    assert codes[mode] == [-9, -9, 0]
    whole = advanced(Run(mode), 50)
    resumed = Run(mode, seed=1).load(folder / mode / "run.pt")
    assert resumed.part == 50
    assert same(weights(resumed.model), weights(whole.model))
    backward(resumed.model, 0)


KINDS = {
    "SGD": lambda model, **o: NVRMSGD(model, lr=0.1, momentum=0.9, b=0.05, **o),
    "Adam": lambda model, **o: NVRMAdam(model, b=0.05, **o),
    "any": lambda model: NVRM(torch.optim.Adam(model.parameters()), model=model, b=0.05),
    "copied": lambda model: copy.deepcopy(NVRMAdam(model, b=0.05)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("width", [3, 30])
def test_a_state_of_other_shapes_is_refused(kind, inner, width):
    """Fused kernels do not check shapes: they would read or write other memory."""
    small = torch.nn.Linear(5, 8)
    optimizer = (
        NVRMSGD(small, lr=0.1, momentum=0.9, b=0.05) if kind == "SGD" else NVRMAdam(small, b=0.05)
    )
    small(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    other = KINDS[kind](torch.nn.Linear(5, width))
    before = other.state_dict()
    state = optimizer.inner.state_dict() if inner else optimizer.state_dict()
    load = other.inner.load_state_dict if inner else other.load_state_dict
    sentence = (
        rf"parameter 0 has shape \({width}, 5\), but its '.*' in the state dict has shape \(8, 5\)"
    )
    with pytest.raises(ValueError, match=sentence):
        load(state)
    assert other.state_dict() == before
