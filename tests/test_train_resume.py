"""Checkpoints: stopping anywhere equals never stopping, to the bit; and files that are refused."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from neuvar import NVRMSGD
from neuvar._batches import Generators
from neuvar.continual import EWC, MAS, SI
from neuvar.schedule import BSchedule, Constant, Linear
from neuvar.train import OPTIMIZERS, Checkpoint, fit
from neuvar.train import checkpoint as checkpoint_module
from tests.toy import same
from tests.trainings import (
    Chunks,
    StoppedError,
    StoppingCheckpoint,
    network,
    optimizer,
    state,
)

EPOCHS = 3


@pytest.fixture(autouse=True)
def generator(monkeypatch):
    """Dropout draws from torch's own generator; other tests shall not notice."""
    monkeypatch.setattr("os.fsync", lambda _: None)  # no power fails here
    with torch.random.fork_rng(devices=[]):
        yield


def looks(model):
    return {"norm": float(sum(x.double().square().sum() for x in state(model)))}


def trained(
    name, *, stop=-1, checkpoint=None, seed=0, penalty=None, known=False, epochs=EPOCHS, **options
):
    """Train in objects of its own; what is asked for is in the options."""
    torch.manual_seed(seed)
    model = network(dropout=True, norm=True)
    opt = optimizer(name, model, known=known)
    schedule = StepLR(opt, 1, gamma=0.7)
    torch.manual_seed(seed)
    result = fit(
        model, Chunks(stop=stop), opt, epochs=epochs, schedule=schedule, checkpoint=checkpoint,
        measure=looks, measure_perturbed=lambda m: {"noisy": looks(m)["norm"]},
        penalty=penalty() if penalty else None, **options,
    )  # fmt: skip
    return result, state(model), opt


def assert_resumes(tmp_path, name, stop, **options):
    expected, weights, opt = trained(name, **options)
    path = tmp_path / "c.pt"
    with pytest.raises(StoppedError):
        trained(name, stop=stop, checkpoint=Checkpoint(path, every=0), **options)
    assert path.exists()
    result, resumed, again = trained(name, checkpoint=Checkpoint(path, every=0), seed=9, **options)
    assert result == expected
    assert same(resumed, weights)
    assert again.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == pytest.approx(0.05 * 0.7**3)
    assert not list(tmp_path.glob("*.part"))


class TestResume:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("stop", [1, 7, 13])
    def test_every_optimizer_with_dropout_norm_and_schedule(self, tmp_path, name, stop):
        """Inside the first epoch, at its end, and just before that of the second."""
        assert_resumes(tmp_path, name, stop)

    @pytest.mark.parametrize("name", ["nvrm-sgd", "sam-adam"])
    @pytest.mark.parametrize("stop", [2, 6, 8, 14, 15, 20])
    def test_anywhere(self, tmp_path, name, stop):
        assert_resumes(tmp_path, name, stop)

    @pytest.mark.parametrize("name", ["sgd", "nvrm-adam", "sam-adam"])
    @pytest.mark.parametrize("stop", [4, 5, 7, 9])
    def test_inside_accumulation(self, tmp_path, name, stop):
        """What was gathered of an unfinished step is taken again."""
        assert_resumes(tmp_path, name, stop, accumulate=3, clip=0.5)

    @pytest.mark.parametrize("name", ["adam", "nvrm-sgd"])
    @pytest.mark.parametrize("stop", [1, 13])
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_mixed_precision(self, tmp_path, name, stop, precision):
        assert_resumes(tmp_path, name, stop, precision=precision)

    @pytest.mark.parametrize("name", ["adam", "nvrm-adam"])
    @pytest.mark.parametrize("stop", [1, 13])
    @pytest.mark.parametrize("make", [EWC, SI, MAS])
    def test_a_penalty_in_the_middle_of_a_task(self, tmp_path, name, stop, make):
        def after_one_task():
            model, penalty = network(dropout=True, norm=True), make(3.0)
            fit(model, Chunks(), optimizer("sgd", model), epochs=1, penalty=penalty)
            penalty.after_task(model, Chunks().inputs)
            return penalty

        penalties = []

        def fresh():
            """The one that resumes knows nothing but what the checkpoint says."""
            penalties.append(make(3.0) if len(penalties) == 2 else after_one_task())
            return penalties[-1]

        assert_resumes(tmp_path, name, stop, penalty=fresh, clip=0.5)
        first, last = penalties[0].state_dict(), penalties[-1].state_dict()
        for part, values in first.items():
            if isinstance(values, dict):
                assert all(torch.equal(v, last[part][n]) for n, v in values.items())
            else:
                assert values == last[part]

    @pytest.mark.parametrize("stop", [1, 7, 13])
    def test_a_known_model(self, tmp_path, stop):
        assert_resumes(tmp_path, "nvrm-sgd", stop, known=True)

    @pytest.mark.parametrize("stop", [1, 4, 9, 16])
    def test_several_stops(self, tmp_path, stop):
        """Stopped, resumed and stopped again."""
        expected, weights, _ = trained("nvrm-adam")
        path = tmp_path / "c.pt"
        for end in (stop, stop + 1, stop + 4):
            with pytest.raises(StoppedError):
                trained("nvrm-adam", stop=end, checkpoint=Checkpoint(path, every=0))
        result, resumed, _ = trained("nvrm-adam", checkpoint=path, seed=3)
        assert result == expected
        assert same(resumed, weights)

    @pytest.mark.parametrize("name", ["sgd", "nvrm-sgd"])
    def test_after_the_end(self, tmp_path, name):
        """The last checkpoint is of the end: nothing is trained, everything is told."""
        path = tmp_path / "c.pt"
        expected, weights, _ = trained(name, checkpoint=Checkpoint(path, every=0))
        result, resumed, _ = trained(name, stop=1, checkpoint=path)
        assert result == expected
        assert same(resumed, weights)

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_the_end_is_saved(self, tmp_path, name, known):
        """With clean weights; further epochs are those of a training that never ended."""
        path = tmp_path / "c.pt"
        _, weights, _ = trained(name, known=known, checkpoint=Checkpoint(path, every=math.inf))
        model = network(dropout=True, norm=True)
        model.load_state_dict(torch.load(path, weights_only=True)["fit"]["model"])
        assert same(state(model), weights)
        expected, weights, _ = trained(name, known=known, epochs=5)
        result, resumed, _ = trained(name, known=known, epochs=5, seed=9, checkpoint=path)
        assert result == expected
        assert same(resumed, weights)

    def test_an_end_that_was_loaded_is_not_saved_again(self, tmp_path):
        path = tmp_path / "c.pt"
        trained("sgd", checkpoint=path)
        before = path.stat().st_mtime_ns, path.stat().st_ino
        trained("sgd", checkpoint=path)
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == before

    def test_a_training_that_diverged_has_no_end(self, tmp_path):
        model = network(relu=True)
        opt = optimizer("sgd", model, lr=1e30)
        assert not fit(model, Chunks(), opt, epochs=2, checkpoint=tmp_path / "c.pt").finished
        assert not list(tmp_path.iterdir())

    def test_from_an_earlier_checkpoint(self, tmp_path):
        """What was done since the last checkpoint is done again."""
        expected, weights, _ = trained("nvrm-sgd")
        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            trained("nvrm-sgd", checkpoint=StoppingCheckpoint(path, before=6))
        result, resumed, _ = trained("nvrm-sgd", checkpoint=path, seed=3)
        assert result == expected
        assert same(resumed, weights)

    @pytest.mark.parametrize("name", ["sgd", "nvrm-sgd", "sam-sgd"])
    def test_divergence_is_the_same_with_a_stop(self, tmp_path, name):
        def run(stop=-1, checkpoint=None):
            model = network(relu=True)
            opt = optimizer(name, model, lr=1e30)
            return fit(model, Chunks(40, 2, stop=stop), opt, epochs=2, checkpoint=checkpoint)

        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            run(stop=12, checkpoint=Checkpoint(path, every=0))  # the weights are NaN by then
        saved = torch.load(path, weights_only=True)["fit"]["model"]
        assert not all(bool(x.isfinite().all()) for x in saved.values())
        assert run(checkpoint=path) == run()


class TestBSchedule:
    """A schedule of b steps after each step, and resumes with the training."""

    def trained(self, *, stop=-1, checkpoint=None, rule=None, initial=0.2, **options):
        torch.manual_seed(0)
        model = network(dropout=True)
        opt = NVRMSGD(model.parameters(), lr=0.05, b=initial)
        rule = BSchedule(opt, rule or Linear(15))
        result = fit(
            model, Chunks(stop=stop), opt, epochs=EPOCHS, b_schedule=rule, checkpoint=checkpoint,
            schedule=StepLR(opt, 1, gamma=0.7), **options,
        )  # fmt: skip
        return result, state(model), opt, rule

    @pytest.mark.parametrize(("accumulate", "steps"), [(1, 21), (3, 9)])
    def test_it_counts_steps(self, accumulate, steps):
        """Three epochs of seven batches."""
        _, _, opt, rule = self.trained(accumulate=accumulate)
        assert rule.steps == steps
        assert opt.param_groups[0]["b"] == pytest.approx(0.2 * min(steps / 15, 1))

    def test_the_noise_has_the_scale_of_the_schedule(self):
        _, weights, *_ = self.trained(rule=Constant())
        model = network(dropout=True)
        opt = NVRMSGD(model.parameters(), lr=0.05, b=0.2)
        torch.manual_seed(0)
        network(dropout=True)
        fit(model, Chunks(), opt, epochs=EPOCHS, schedule=StepLR(opt, 1, gamma=0.7))
        assert same(state(model), weights)
        _, others, *_ = self.trained()
        assert not same(others, weights)

    @pytest.mark.parametrize("stop", [1, 7, 13])
    def test_it_resumes(self, tmp_path, stop):
        expected, weights, opt, rule = self.trained()
        path = tmp_path / "c.pt"
        with pytest.raises(StoppedError):
            self.trained(stop=stop, checkpoint=Checkpoint(path, every=0))
        result, resumed, again, other = self.trained(checkpoint=path)
        assert result == expected
        assert same(resumed, weights)
        assert other.steps == rule.steps
        for key in ("b", "initial_b"):
            assert again.param_groups[0][key] == opt.param_groups[0][key]

    def test_what_is_refused(self, tmp_path):
        path = tmp_path / "c.pt"
        self.trained(checkpoint=Checkpoint(path, every=0))
        with pytest.raises(ValueError, match="has the rule"):
            self.trained(checkpoint=path, rule=Linear(99))
        model = network(dropout=True)
        opt = NVRMSGD(model.parameters(), lr=0.05, b=0.2)
        with pytest.raises(ValueError, match="saved with a b_schedule; this run has none"):
            fit(
                model, Chunks(), opt, epochs=EPOCHS, checkpoint=path,
                schedule=StepLR(opt, 1, gamma=0.7),
            )  # fmt: skip
        other = NVRMSGD(network().parameters(), lr=0.05, b=0.2)
        for wrong in (BSchedule(other, Linear(5)), StepLR(opt, 1), 0.1):
            with pytest.raises(ValueError, match="a BSchedule of the same optimizer"):
                fit(model, Chunks(), opt, epochs=1, b_schedule=wrong)


class TestTheFile:
    def test_nothing_is_written_too_early(self, tmp_path):
        saved = Checkpoint(tmp_path / "c.pt", every=3600)
        with pytest.raises(StoppedError):
            trained("sgd", stop=20, checkpoint=saved)
        assert not saved.due()
        assert not list(tmp_path.iterdir())

    def test_it_loads_with_weights_only_and_makes_its_folder(self, tmp_path):
        path = tmp_path / "a" / "b" / "c.pt"
        trained("nvrm-adam", checkpoint=Checkpoint(path, every=0))
        result = torch.load(path, weights_only=True)
        assert result["format"] == checkpoint_module.FORMAT
        assert result["fit"]["epoch"] == EPOCHS

    def test_a_failure_leaves_the_old_one_and_no_rest(self, tmp_path, monkeypatch):
        path = tmp_path / "c.pt"
        saved = Checkpoint(path, every=0)
        saved.write({"a": 1})
        before = path.read_bytes()

        def half(what, file):
            file.write(b"half of it")
            raise OSError("no space left")

        monkeypatch.setattr(checkpoint_module.torch, "save", half)
        with pytest.raises(OSError, match="no space"):
            saved.write({"a": 2})
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]

    def test_a_failure_to_move_leaves_no_rest(self, tmp_path, monkeypatch):
        saved = Checkpoint(tmp_path / "c.pt", every=0)
        monkeypatch.setattr("os.fsync", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            saved.write({"a": 1})
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("kind", ["garbage", "empty", "truncated", "pickle"])
    def test_what_cannot_be_read_is_refused_in_one_sentence(self, tmp_path, kind):
        path = tmp_path / "c.pt"
        trained("sgd", checkpoint=Checkpoint(path, every=0))
        whole = path.read_bytes()
        if kind == "pickle":  # code that would run if it were unpickled
            torch.save({"format": 3, "outer": {}, "fit": print}, path)
        else:
            broken = {
                "garbage": b"\x80garbage",
                "empty": b"",
                "truncated": whole[: len(whole) // 2],
            }
            path.write_bytes(broken[kind])
        with pytest.raises(ValueError, match=r"c\.pt is not a readable checkpoint") as error:
            trained("sgd", checkpoint=path)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "content",
        [{"format": 2, "outer": {}, "fit": {}}, {"format": 3, "outer": {}}, [1, 2],
         {"format": 3, "outer": 3, "fit": {}}, {"format": 3, "outer": {}, "fit": None}],
        ids=str,
    )  # fmt: skip
    def test_another_content_is_refused(self, tmp_path, content):
        torch.save(content, tmp_path / "c.pt")
        with pytest.raises(ValueError, match="not a checkpoint of this version"):
            trained("sgd", checkpoint=tmp_path / "c.pt")

    def test_it_is_read_once(self, tmp_path):
        Checkpoint(tmp_path / "c.pt").write({"a": 1})
        checkpoint = Checkpoint(tmp_path / "c.pt")
        assert checkpoint.read()
        assert checkpoint.read()
        assert checkpoint.saved == {"a": 1}
        checkpoint.saved = None  # as fit() sets it when it has resumed
        assert not checkpoint.read()
        assert not Checkpoint(tmp_path / "other.pt").read()

    def test_the_outer_state_goes_along(self, tmp_path):
        saved = Checkpoint(tmp_path / "c.pt")
        saved.outer = {"task": 3, "accuracies": [[0.5]]}
        saved.write({})
        again = Checkpoint(tmp_path / "c.pt")
        assert again.outer == {}
        again.read()
        assert again.outer == {"task": 3, "accuracies": [[0.5]]}

    def test_when_it_is_due(self, tmp_path, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(checkpoint_module.time, "monotonic", lambda: now[0])
        saved = Checkpoint(tmp_path / "c.pt", every=60)
        assert not saved.due()
        now[0] = 160.0
        assert saved.due()
        saved.write({})
        assert not saved.due()
        with pytest.raises(ValueError, match="every must be a number of seconds >= 0, got -1"):
            Checkpoint(tmp_path / "c.pt", every=-1)


class TestAnotherTraining:
    """A checkpoint of something else is refused before anything is changed."""

    def refused(self, path, word, model=None, opt="nvrm-sgd", batches=None, **options):
        model = model or network()
        before, opt = state(model), optimizer(opt, model)
        with pytest.raises(ValueError, match=word) as error:
            fit(model, batches or Chunks(), opt, epochs=2, checkpoint=path, **options)
        assert "\n" not in str(error.value)
        assert same(state(model), before)
        assert not opt.state

    def test_all_kinds(self, tmp_path):
        path, model = tmp_path / "c.pt", network()
        saved = Checkpoint(path, every=0)
        fit(model, Chunks(), optimizer("nvrm-sgd", model), epochs=2, checkpoint=saved)
        self.refused(path, "another model: '1.weight'", model=network(norm=True))
        wide = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.refused(path, "another model: '0.weight'", model=wide)
        self.refused(path, "another optimizer: NVRM around SGD, not Adam", opt="adam")
        self.refused(path, "NVRM around SGD, not NVRM around Adam", opt="nvrm-adam")
        self.refused(path, "NVRM around SGD, not SAM around SGD", opt="sam-sgd")
        self.refused(path, "another number of batches: 7, not 13", batches=Chunks(size=2))
        self.refused(path, "another accumulate: 1, not 2", accumulate=2)
        self.refused(path, "without a penalty", penalty=EWC(1.0))
        self.refused(path, "another precision", precision="fp16")
        other = network()
        with pytest.raises(
            ValueError, match=r"the checkpoint has 2 epochs, more than 1\. Remove the file"
        ):
            fit(other, Chunks(), optimizer("nvrm-sgd", other), epochs=1, checkpoint=path)
        other = network()
        opt = optimizer("nvrm-sgd", other)
        with pytest.raises(ValueError, match="without a schedule"):
            fit(other, Chunks(), opt, epochs=2, checkpoint=path, schedule=StepLR(opt, 1))

    def test_with_what_is_missing_now(self, tmp_path):
        path, model = tmp_path / "c.pt", network()
        opt, saved = optimizer("nvrm-sgd", model), Checkpoint(path, every=0)
        fit(
            model, Chunks(), opt, epochs=2, checkpoint=saved, schedule=StepLR(opt, 1),
            penalty=EWC(1.0), precision="fp16",
        )  # fmt: skip
        self.refused(path, "with a schedule")
        other = network()
        opt = optimizer("nvrm-sgd", other)
        with pytest.raises(ValueError, match="with a penalty"):
            fit(other, Chunks(), opt, epochs=2, checkpoint=path, schedule=StepLR(opt, 1))

    def test_no_training_at_all(self, tmp_path):
        Checkpoint(tmp_path / "c.pt").write({"model": {}})
        self.refused(tmp_path / "c.pt", "has no 'optimizer': it is not one of a training")


class TestRandomStates:
    def test_of_another_device(self, monkeypatch):
        """The device's own generator goes along with the CPU's."""
        states = {"cuda:1": torch.tensor([7], dtype=torch.uint8)}

        class Module:
            @staticmethod
            def get_rng_state(device):
                return states[str(device)]

            @staticmethod
            def set_rng_state(state, device):
                states[str(device)] = state

        monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
        device = torch.device("cuda:1")
        generators = Generators(device)
        saved = generators.state_dict()
        expected = torch.rand(3)
        states["cuda:1"] = torch.tensor([8], dtype=torch.uint8)
        generators.load_state_dict(saved)
        assert states["cuda:1"].item() == 7
        assert torch.equal(torch.rand(3), expected)
        cpu = Generators(torch.device("cpu"))
        assert cpu.state_dict().keys() == {"torch"}
        cpu.load_state_dict(saved)  # a training may resume on another device
        assert torch.equal(torch.rand(3), expected)
        assert math.isfinite(float(torch.rand(())))
