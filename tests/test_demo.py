"""The demo runs and its task is what it says; what it shows is for people to see."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from neuvar.data import mnist_excerpt

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo"]


def test_exactly_forty_per_cent_of_labels_are_wrong(demo):
    right = mnist_excerpt().train.labels
    task = demo.pair_flipped_task(seed=3)
    assert task.is_wrong.sum() == 2400
    assert (task.labels[~task.is_wrong] == right[~task.is_wrong]).all()
    assert (task.labels[task.is_wrong] == (right[task.is_wrong] + 1) % 10).all()
    assert (task.test_labels == mnist_excerpt().test.labels).all()


def test_labels_depend_on_the_seed_only(demo):
    again = demo.pair_flipped_task(seed=3).labels
    assert (demo.pair_flipped_task(seed=3).labels == again).all()
    assert (demo.pair_flipped_task(seed=4).labels != again).any()


def test_demo_prints_and_draws(tmp_path):
    out = tmp_path / "new" / "demo.png"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(DEMO), "--epochs", "1", "--out", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "NVRM-Adam" in done.stdout
    assert "test accuracy" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert out.read_bytes().startswith(b"\x89PNG")


def test_demo_refuses_no_epochs():
    done = subprocess.run(
        [sys.executable, str(DEMO), "--epochs", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--epochs must be at least 1, got 0" in done.stderr
