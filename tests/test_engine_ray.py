"""Sweeps on a Ray cluster of several nodes, which are processes on this machine."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest

from neuvar.engine import Kind, sweep
from neuvar.experiments.run_spec import as_dict
from tests.conftest import PATIENCE
from tests.test_engine import lasting, runs, soon, toy

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

CODE = """
import json, sys
from neuvar.engine import sweep
from neuvar.engine import Kind, sweep
from neuvar.experiments.run_spec import from_dict
from tests.test_engine import toy
folder, address, text = sys.argv[1:]
found = sweep(
    [from_dict(run) for run in json.loads(text)],
    folder + "/x.jsonl",
    engine="ray",
    address=address,
    data=folder + "/data",
    tensorboard=folder + "/board",
    watch=lambda event: print(event.kind, event.key, event.message, flush=True),
    run_one=toy,
)
print(json.dumps(vars(found)))
"""


class Cluster:
    """A head, which also works, and further nodes; each has one core.

    Only who knows its token may use it, which is new each time and none of the user's.
    """

    def __init__(self, folder):
        self.folder = folder
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self.environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "OMP_NUM_THREADS": "1",
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        port = self.address.partition(":")[2]
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}/r"]
        self.nodes = []
        self.add(*head)

    def add(self, *words):
        """Start a node and wait until it is there; two at once on one machine may collide."""
        log = self.folder / f"log{len(self.nodes)}"
        with log.open("w") as out:
            node = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *("--num-cpus=1", "--object-store-memory=80000000"),
                    *("--node-ip-address=127.0.0.1", "--disable-usage-stats"),
                    *(words or [f"--address={self.address}"]),
                ],
                stdout=out,
                stderr=out,
                env=self.environment | {"TMPDIR": str(self.folder)},
                start_new_session=True,
            )
        self.nodes.append(node)
        assert soon(lambda: "Ray runtime started" in log.read_text()), log.read_text()

    def raylet(self, number):
        """The process that stands for a node."""
        found = children(self.nodes[number].pid)
        return next(pid for pid in found if b"/raylet" in command(pid).split(b"\0")[0])

    def stop(self):
        for node in reversed(self.nodes):
            for pid in descendants(node.pid):
                with_care(os.kill, pid, signal.SIGKILL)
            with_care(os.killpg, node.pid, signal.SIGKILL)
            node.wait()


def with_care(kill, *arguments):
    try:
        kill(*arguments)
    except ProcessLookupError:
        return


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def descendants(pid):
    found = children(pid)
    return found + [inner for child in found for inner in descendants(child)]


@pytest.fixture
def cluster():
    # Names of sockets are short: the folder cannot be pytest's.
    folder = Path(tempfile.mkdtemp(prefix="nv", dir="/tmp"))
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


def start(folder, cluster, work):
    (folder / "data").mkdir(exist_ok=True)
    text = json.dumps([as_dict(run) for run in work])
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), cluster.address, text],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cluster.environment,
    )


@pytest.mark.slow
def test_a_node_is_killed_and_every_run_is_recorded_once(cluster, tmp_path):
    for _ in range(2):
        cluster.add()
    # No run ends before the node is killed, however late that is on a busy machine.
    work = [*runs(8, "until enough", lr=0.1), *runs(1, "diverges"), *runs(1, "raises")]
    driver = start(tmp_path, cluster, work)
    victim = cluster.raylet(1)

    def begun():
        """Runs that the node to be killed has begun and nobody has finished."""
        mine = set(map(str, children(victim)))
        recorded = (tmp_path / "x.jsonl").read_text() if (tmp_path / "x.jsonl").exists() else ""
        return [
            path.stem
            for path in (tmp_path / "data").iterdir()
            if path.stem not in recorded and mine & set(path.read_text().split())
        ]

    assert soon(lambda: begun() or driver.poll() is not None)
    interrupted, workers = begun(), children(victim)
    os.kill(victim, signal.SIGKILL)
    assert soon(lambda: not any(map(command, workers)))
    (tmp_path / "data" / "enough").touch()
    out, err = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, err
    assert interrupted
    summary = json.loads(out.splitlines()[-1])
    fine, diverges, raises = (
        [run.key for run in work if run.model == model]
        for model in ("until enough", "diverges", "raises")
    )
    found = lasting(tmp_path / "x.jsonl")  # no key is there twice
    assert sorted(found) == sorted(fine + diverges)
    assert sorted(summary["finished"]) == sorted(fine)
    assert summary["diverged"] == {diverges[0]: "the loss is nan at step 3"}
    assert summary["failed"] == {raises[0]: "RuntimeError: something is wrong"}
    begins = (tmp_path / "data" / f"{interrupted[0]}.begun").read_text().splitlines()
    assert len(begins) >= 2
    for run in work[:8]:
        x = [run.seed]
        for _ in range(run.epochs):
            x.append((x[-1] * 1103515245 + 12345) % 2**31)
        assert found[run.key]["curves"]["x"] == x[1:]
        assert found[run.key]["threads"] == found[run.key]["threads_seen"] == 1
    events = [text.split()[:2] for text in out.splitlines()[:-1]]
    assert {tuple(event[:1]) for event in events} <= {(kind,) for kind in get_args(Kind)}
    assert err == ""  # Ray itself says nothing
    for run in work:
        kinds = [kind for kind, key in events if key == run.key]
        assert kinds[0] == "started"
        assert sum(kind in ("finished", "diverged", "failed") for kind in kinds) == 1
        assert any((tmp_path / "board" / run.key).glob("events.out.tfevents*"))
    assert not (tmp_path / ".checkpoints").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://localhost:1", "127.0.0.1:99999"])
def test_an_address_where_nobody_answers(tmp_path, address):
    with pytest.raises(ConnectionError, match=f"no Ray cluster answers at address '{address}'"):
        sweep(runs(1), tmp_path / "x.jsonl", engine="ray", address=address, run_one=toy)
    assert list(tmp_path.iterdir()) == []
