"""Ray Train with two workers: evaluation, checkpoints, restarts, and b="auto" alike on both.

The reference is a loop written by hand, with an optimizer created from parameters alone.
"""

import os
import tempfile
from pathlib import Path

import pytest
import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import neuvar

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0) + (X[:, 1] > 0).long()
DATA = TensorDataset(X, Y)
BATCH, EPOCHS, CLIP = 8, 3, 0.5


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


class Job:
    """One model that both workers train together."""

    def __init__(self, b):
        self.model = prepare_model(make_model())
        self.optimizer = neuvar.NVRMAdam(self.model, lr=0.05, b=b)
        self.loader = prepare_data_loader(DataLoader(DATA, batch_size=BATCH, shuffle=True))

    def run(self, epoch):
        """Train for an epoch; returns predictions, weights and b after it."""
        model, optimizer = self.model, self.optimizer
        self.loader.sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in self.loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            optimizer.report_loss(loss)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            scores = model(X)
        weights = {key: value.clone() for key, value in model.module.state_dict().items()}
        return {"scores": scores, "weights": weights, "b": optimizer.param_groups[0]["b"]}

    def state(self):
        return {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def run_worker(config):
    """What each worker does: it fails after the first epoch, and is started again by Ray."""
    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), train.get_context().get_world_rank()
    jobs, begin = {"fixed": Job(0.05), "auto": Job("auto")}, 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as place:
            state = torch.load(Path(place) / "state.pt", weights_only=True)
        begin = state["epoch"] + 1
        for name, job in jobs.items():
            job.load(state[name])
    for epoch in range(begin, EPOCHS):
        if epoch == 1 and begin == 0:
            raise RuntimeError("as if the machine had failed")
        seen = {name: job.run(epoch) for name, job in jobs.items()}
        torch.save(seen, folder / f"epoch {epoch} rank {rank}.pt")
        with tempfile.TemporaryDirectory() as place:
            state = {name: job.state() for name, job in jobs.items()} | {"epoch": epoch}
            torch.save(state, Path(place) / "state.pt")
            saved = train.Checkpoint.from_directory(place) if rank == 0 else None
            train.report({"b": seen["auto"]["b"]}, checkpoint=saved)
    again = Job("auto")  # the same without a failure
    torch.save([again.run(epoch) for epoch in range(EPOCHS)], folder / f"whole rank {rank}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What both workers have seen after each epoch, in a folder, and the result of Ray."""
    folder = tmp_path_factory.mktemp("ray")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.shutdown()  # that of another test
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            storage_path=str(folder / "ray"), failure_config=train.FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    ray.shutdown()
    return folder, result


def train_by_hand(*, b):
    """The same training in one process; returns clean weights and scores after each epoch."""
    model = make_model()
    optimizer = neuvar.NVRMAdam(model.parameters(), lr=0.05, b=b)
    params = list(model.parameters())
    weights, scores = [], []
    for epoch in range(EPOCHS):
        parts = []
        for rank in range(2):
            sampler = DistributedSampler(DATA, num_replicas=2, rank=rank, shuffle=True)
            sampler.set_epoch(epoch)
            parts.append(torch.tensor(list(sampler)).split(BATCH))
        for rows in zip(*parts, strict=True):
            grads = []
            for row in rows:
                loss = cross_entropy(model(X[row]), Y[row])
                grads.append(torch.autograd.grad(loss, params))
            for p, *both in zip(params, *grads, strict=True):
                p.grad = sum(both) / 2
            nn.utils.clip_grad_norm_(params, CLIP)
            optimizer.step()
        with optimizer.denoised(), torch.no_grad():
            weights.append({key: value.clone() for key, value in model.state_dict().items()})
            scores.append(model(X))
    return weights, scores


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.slow
def test_evaluation_and_checkpoints_are_clean_also_after_a_restart(trained):
    folder, result = trained
    weights, scores = train_by_hand(b=0.05)
    for epoch in range(EPOCHS):
        for rank in range(2):
            seen = torch.load(folder / f"epoch {epoch} rank {rank}.pt")["fixed"]
            assert_same(seen["weights"], weights[epoch])
            assert torch.equal(seen["scores"], scores[epoch])
    with result.checkpoint.as_directory() as place:
        state = torch.load(Path(place) / "state.pt", weights_only=True)
    assert_same(state["fixed"]["model"], weights[-1])


@pytest.mark.slow
def test_auto_is_alike_on_both_workers_also_after_a_restart(trained):
    folder, result = trained
    first, second = (torch.load(folder / f"whole rank {rank}.pt") for rank in range(2))
    assert len({seen["b"] for seen in first}) > 1
    for epoch in range(EPOCHS):
        resumed = [torch.load(folder / f"epoch {epoch} rank {rank}.pt")["auto"] for rank in (0, 1)]
        for seen in (second[epoch], *resumed):
            assert seen["b"] == first[epoch]["b"]
            assert_same(seen["weights"], first[epoch]["weights"])
    assert result.metrics["b"] == first[-1]["b"]
