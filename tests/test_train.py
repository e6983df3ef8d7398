"""The training loop against loops written by hand, to the bit; its options, and how it ends."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import StepLR

from neuvar.baselines import PSGD, SAM, SGLD
from neuvar.continual import EWC, MAS, SI
from neuvar.optim import NVRM
from neuvar.train import OPTIMIZERS, Checkpoint, fit, make_optimizer
from tests.toy import same
from tests.trainings import Chunks, StoppedError, network, optimizer, state

PLAIN = ("sgd", "adam", "adamw", "nvrm-sgd", "nvrm-adam", "nvrm-adamw", "psgd", "sgld")


def by_hand(model, opt, batches, epochs, *, clip=0.0, schedule=None, penalty=None, bf16=False):
    """An ordinary training loop, with nothing but torch."""
    for number in range(epochs):
        for inputs, labels in batches.epoch(number):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                scores = model(inputs)
            loss = cross_entropy(scores.float() if bf16 else scores, labels)
            if penalty is not None:
                loss = loss + penalty(model)
            loss.backward()
            if clip:
                if penalty is not None:
                    penalty.before_clip(model)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            if penalty is not None:
                penalty.after_step(model)
        if schedule is not None:
            schedule.step()
    if hasattr(opt, "eval"):
        opt.eval()


class TestAgainstALoopByHand:
    @pytest.mark.parametrize("name", PLAIN)
    @pytest.mark.parametrize("options", [{}, {"clip": 0.3}, {"bf16": True}], ids=str)
    def test_every_optimizer_to_the_bit(self, name, options):
        ours, theirs = network(norm=True), network(norm=True)
        by_hand(theirs, optimizer(name, theirs), Chunks(), 2, **options)
        precision = "bf16" if options.pop("bf16", False) else "float32"
        result = fit(
            ours, Chunks(), optimizer(name, ours), epochs=2, precision=precision, **options
        )
        assert result.finished
        assert same(state(ours), state(theirs))
        assert not same(state(ours), state(network(norm=True)))

    @pytest.mark.parametrize("name", PLAIN)
    def test_a_schedule_steps_after_each_epoch(self, name):
        ours, theirs = network(), network()
        one, other = optimizer(name, ours), optimizer(name, theirs)
        by_hand(theirs, other, Chunks(), 3, schedule=StepLR(other, 2))
        fit(ours, Chunks(), one, epochs=3, schedule=StepLR(one, 2))
        assert same(state(ours), state(theirs))
        assert one.param_groups[0]["lr"] == pytest.approx(0.005)

    @pytest.mark.parametrize("name", ["sgd", "adam", "nvrm-sgd", "nvrm-adam"])
    @pytest.mark.parametrize("make", [EWC, SI, MAS])
    @pytest.mark.parametrize("clip", [0.0, 0.2])
    def test_a_penalty(self, name, make, clip):
        models, penalties = [network(), network()], [make(50.0), make(50.0)]
        for turn in range(2):
            for train, model, penalty in zip((fit, by_hand), models, penalties, strict=True):
                opt = optimizer(name, model)
                both = (Chunks(), opt) if train is fit else (opt, Chunks())
                train(model, *both, epochs=2, penalty=penalty, clip=clip)
                if not turn:
                    penalty.after_task(model, Chunks().inputs)
        assert same(state(models[0]), state(models[1]))
        # What was gathered on the way is the same, too: before_clip and after_step were called.
        for penalty, model in zip(penalties, models, strict=True):
            penalty.after_task(model, Chunks().inputs)
        ours, theirs = (p.state_dict()["importance"] for p in penalties)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert any(bool(x.any()) for x in ours.values())

    @pytest.mark.parametrize("name", ["sgd", "adam", "nvrm-sgd", "nvrm-adam"])
    @pytest.mark.parametrize("penalty", [False, True])
    def test_accumulating_equals_one_large_batch(self, name, penalty):
        """In float64 up to rounding; the penalty counts once."""
        models, wide = [], torch.float64
        for size, accumulate in ((4, 3), (12, 1)):
            model = network(dtype=wide)
            held = EWC(5.0) if penalty else None
            if held is not None:
                held.after_task(model, Chunks(dtype=wide).inputs)
                with torch.no_grad():
                    next(model.parameters()).add_(0.5)
            fit(
                model, Chunks(24, size, dtype=wide), optimizer(name, model), epochs=3,
                accumulate=accumulate, penalty=held,
            )  # fmt: skip
            models.append(state(model))
        for ours, theirs in zip(*models, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)

    def test_the_last_step_of_an_epoch_may_have_fewer_batches(self):
        ours, theirs = network(), network()
        opt = optimizer("sgd", theirs)
        for number in range(2):
            batches = list(Chunks().epoch(number))
            for group in (batches[:3], batches[3:6], batches[6:]):
                opt.zero_grad()
                for inputs, labels in group:
                    (cross_entropy(theirs(inputs), labels) / len(group)).backward()
                opt.step()
        fit(ours, Chunks(), optimizer("sgd", ours), epochs=2, accumulate=3)
        assert same(state(ours), state(theirs))

    @pytest.mark.parametrize("inner", ["sgd", "adam", "adamw"])
    @pytest.mark.parametrize("clip", [0.0, 0.2])
    def test_sharpness_aware_minimization(self, inner, clip):
        """Two gradients a step, by the formula, in float64."""
        ours, theirs = (network(dtype=torch.float64) for _ in range(2))
        plain, rho = optimizer(inner, theirs), 0.1
        for inputs, labels in Chunks(dtype=torch.float64).epoch(0):
            params = list(theirs.parameters())
            first = torch.autograd.grad(cross_entropy(theirs(inputs), labels), params)
            norm = torch.cat([g.flatten() for g in first]).norm()
            before = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p, g in zip(params, first, strict=True):
                    p.add_(rho * g / norm)
            second = torch.autograd.grad(cross_entropy(theirs(inputs), labels), params)
            with torch.no_grad():
                for p, start, g in zip(params, before, second, strict=True):
                    p.copy_(start)
                    p.grad = g
            if clip:
                nn.utils.clip_grad_norm_(params, clip)
            plain.step()
        fit(ours, Chunks(dtype=torch.float64), optimizer(f"sam-{inner}", ours), epochs=1, clip=clip)
        for a, b in zip(state(ours), state(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)

    def test_double_precision_is_kept(self):
        """The loss of float64 scores is taken in float64."""
        seen = []

        def loss(scores, labels):
            seen.append(scores.dtype)
            return cross_entropy(scores, labels)

        model = network(dtype=torch.float64)
        fit(model, Chunks(dtype=torch.float64), optimizer("sgd", model), epochs=1, loss=loss)
        model = network()
        fit(model, Chunks(), optimizer("sgd", model), epochs=1, loss=loss, precision="bf16")
        assert seen == [torch.float64] * 7 + [torch.float32] * 7


class TestCurves:
    def test_mean_loss_and_accuracy_of_the_batches_as_trained_on(self):
        model, theirs, losses, right = network(), network(), [], []
        opt = optimizer("sgd", theirs)
        for inputs, labels in Chunks().epoch(0):
            opt.zero_grad()
            scores = theirs(inputs)
            losses += cross_entropy(scores, labels, reduction="none").tolist()
            right += (scores.argmax(1) == labels).tolist()
            cross_entropy(scores, labels).backward()
            opt.step()
        result = fit(model, Chunks(), optimizer("sgd", model), epochs=1)
        assert result.curves["loss"] == [pytest.approx(sum(losses) / 26, rel=1e-6)]
        assert result.curves["running_accuracy"] == [sum(right) / 26]
        assert result.epochs == 1
        assert result.reason is None

    @pytest.mark.parametrize("ignored", [-100, 1])
    def test_ignored_labels_are_left_out(self, ignored):
        """The curves are means over the labels that the loss does not ignore."""
        loss = nn.CrossEntropyLoss(ignore_index=ignored)
        batches, model, theirs = Chunks(), network(), network()
        batches.labels[::3] = ignored
        losses, right = [], []
        opt = optimizer("sgd", theirs)
        for inputs, labels in batches.epoch(0):
            opt.zero_grad()
            scores, used = theirs(inputs), labels != ignored
            losses += cross_entropy(scores[used], labels[used], reduction="none").tolist()
            right += (scores.argmax(1) == labels)[used].tolist()
            loss(scores, labels).backward()
            opt.step()
        assert 0 < len(right) < 26
        result = fit(model, batches, optimizer("sgd", model), epochs=1, loss=loss)
        assert result.curves["loss"] == [pytest.approx(sum(losses) / len(losses), rel=1e-6)]
        assert result.curves["running_accuracy"] == [sum(right) / len(right)]
        assert same(state(model), state(theirs))

    @pytest.mark.parametrize(
        ("name", "options"), [("sgd", {}), ("nvrm-sgd", {}), ("nvrm-sgd", {"b": "auto"})]
    )
    def test_a_batch_of_ignored_labels_alone_changes_no_curve(self, name, options):
        """Its mean loss is nan, which is no divergence."""
        batches = list(Chunks().epoch(0))
        nothing = (batches[0][0], torch.full_like(batches[0][1], -100))
        curves = []
        for these in (batches, [*batches[:3], nothing, *batches[3:]]):
            model = network()
            opt = optimizer(name, model, lr=1e-30, **options)
            result = fit(model, these, opt, epochs=1)
            assert result.finished
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            curves.append(result.curves)
        if name == "sgd":  # the noise of a step depends on its number
            assert curves[0] == curves[1]

    def test_class_weights(self):
        """The mean over all labels, as the loss takes it over those of a batch."""
        loss, batches = nn.CrossEntropyLoss(torch.tensor([1.0, 9.0, 0.1])), Chunks()
        batches.labels[::5] = -100
        model = network()
        expected = loss(model(batches.inputs), batches.labels).item()
        result = fit(model, batches, optimizer("sgd", model, lr=1e-30), epochs=1, loss=loss)
        assert result.curves["loss"] == [pytest.approx(expected, rel=1e-5)]

    def test_labels_of_sequences(self):
        """Scores of shape (n, classes, length), and some labels ignored."""
        torch.manual_seed(0)
        model = nn.Conv1d(2, 3, 1)
        inputs, labels = torch.randn(6, 2, 5), torch.randint(0, 3, (6, 5))
        labels[:2, 1:] = -100
        scores, used = model(inputs), labels >= 0
        right = (scores.argmax(1) == labels)[used].double().mean().item()
        data = list(zip(inputs.split(2), labels.split(2), strict=True))
        result = fit(model, data, torch.optim.SGD(model.parameters(), lr=1e-30), epochs=1)
        expected = cross_entropy(scores, labels).item()
        assert result.curves["loss"] == [pytest.approx(expected, rel=1e-5)]
        assert result.curves["running_accuracy"] == [pytest.approx(right)]

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_measured_clean_and_perturbed_in_evaluation_mode(self, name):
        model = network(dropout=True)
        opt, seen = optimizer(name, model), {"clean": [], "noisy": []}

        def look(which):
            def measure(given):
                assert given is model
                assert not any(m.training for m in given.modules())
                seen[which].append(state(model))
                return {which: len(seen[which])}

            return measure

        result = fit(
            model, Chunks(), opt, epochs=2, measure=look("clean"), measure_perturbed=look("noisy")
        )
        assert result.curves["clean"] == [1, 2]
        assert all(m.training for m in model.modules())
        assert same(seen["clean"][-1], state(model))
        if name.startswith("nvrm"):
            assert result.curves["noisy"] == [1, 2]
            assert not same(seen["clean"][-1], seen["noisy"][-1])
        else:
            assert "noisy" not in result.curves

    @pytest.mark.parametrize("known", [True, False])
    def test_what_is_measured_at_perturbed_weights_is(self, known):
        model = network()
        opt = optimizer("nvrm-sgd", model, known=known)

        def score(m):
            with torch.no_grad():
                return {"score": float(m(Chunks().inputs).sum())}

        result = fit(
            model, Chunks(), opt, epochs=2, measure=score,
            measure_perturbed=lambda m: {"noisy": score(m)["score"]},
        )  # fmt: skip
        assert len(result.curves["noisy"]) == 2
        assert not set(result.curves["noisy"]) & set(result.curves["score"])

    def test_everything_goes_to_the_writer(self):
        written, model = [], network()

        class Writer:
            def add_scalar(self, tag, value, step):
                written.append((tag, value, step))

        result = fit(
            model, Chunks(), optimizer("nvrm-sgd", model), epochs=2, writer=Writer(),
            measure=lambda m: {"x": torch.tensor(2.0)}, measure_perturbed=lambda m: {"y": 3},
        )  # fmt: skip
        assert {tag for tag, _, _ in written} == {"loss", "running_accuracy", "x", "y"}
        for name, curve in result.curves.items():
            assert [(v, s) for t, v, s in written if t == name] == [(curve[0], 1), (curve[1], 2)]
        assert all(type(value) is float for _, value, _ in written)

    def test_targets_that_are_no_classes(self):
        class Targets(Chunks):
            def epoch(self, number, *, start=0):
                for inputs, _ in super().epoch(number, start=start):
                    yield inputs, inputs[:, :3]

        model = network()
        result = fit(model, Targets(), optimizer("adam", model), epochs=3, loss=mse_loss)
        assert set(result.curves) == {"loss"}
        assert result.curves["loss"][2] < result.curves["loss"][0]

    @pytest.mark.parametrize("name", ["nvrm-sgd", "sam-sgd"])
    def test_an_observer_sees_each_batch_with_its_scores_once(self, name):
        model, seen, batches = network(), [], Chunks()
        opt = optimizer(name, model)

        def observe(batch, scores):
            assert not scores.requires_grad
            assert torch.equal(model(batch[0]), scores)  # the weights are as they were
            seen.append(batch)

        result = fit(model, batches, opt, epochs=2, accumulate=2, observe=observe)
        expected = [batch for number in range(2) for batch in batches.epoch(number)]
        assert len(seen) == len(expected)
        for one, other in zip(seen, expected, strict=True):
            assert all(map(torch.equal, one, other))
        assert (
            result.curves["loss"]
            == fit(
                again := network(), Chunks(), optimizer(name, again), epochs=2, accumulate=2
            ).curves["loss"]
        )

    def test_progress_ends_at_one(self):
        told, model = [], network()
        fit(model, Chunks(100, 2), optimizer("sgd", model), epochs=2, progress=told.append)
        assert told == sorted(told)
        assert told == [0.2, 0.4, 0.5, 0.7, 0.9, 1.0]


class TestHowItEnds:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("size", [4, 26])
    def test_divergence_is_a_status(self, name, size):
        """Also if the very last step goes too far, after which no loss is taken."""
        model = network(relu=True)
        result = fit(model, Chunks(26, size), optimizer(name, model, lr=1e30), epochs=3)
        assert result.status == "diverged"
        assert "not finite" in result.reason
        assert "\n" not in result.reason
        assert result.epochs <= 3
        assert not result.finished

    def test_a_last_step_too_far(self):
        model = network()
        result = fit(
            model, Chunks(4, 4), optimizer("sgd", model, lr=3e38), epochs=1,
            loss=lambda scores, labels: 1e6 * cross_entropy(scores, labels),
        )  # fmt: skip
        weights = torch.cat([p.flatten() for p in model.parameters()])
        assert not bool(weights.isfinite().all())
        assert (result.status, result.epochs) == ("diverged", 1)
        assert math.isfinite(result.curves["loss"][0])

    def test_divergence_is_noticed_inside_an_epoch(self):
        model = network()
        result = fit(model, Chunks(400, 2), optimizer("sgd", model, lr=1e38), epochs=1)
        assert "in epoch 1, by batch 20" in result.reason

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_an_exception_leaves_clean_weights(self, name):
        """The weights after the last whole step, without noise, not at the top of a climb."""

        class Breaks(nn.Sequential):
            calls = 0

            def forward(self, x):
                self.calls += 1
                if self.calls == 12:  # for SAM the second pass of a step
                    raise StoppedError
                return super().forward(x)

        model, theirs = Breaks(*network()), network()
        with pytest.raises(StoppedError):
            fit(model, Chunks(), optimizer(name, model), epochs=3)
        steps = 5 if name.startswith("sam") else 11
        opt = optimizer(name, theirs)
        with pytest.raises(StoppedError):
            fit(theirs, Chunks(stop=steps), opt, epochs=3)
        assert same(state(model), state(theirs))
        assert same(state(theirs), [opt.clean_copy(p) for p in theirs.parameters()]
                    if name.startswith("nvrm") else state(theirs))  # fmt: skip

    def test_no_epochs(self):
        model = network()
        result = fit(model, Chunks(), optimizer("nvrm-sgd", model), epochs=0)
        assert (result.status, result.curves) == ("finished", {})
        assert same(state(model), state(network()))

    def test_the_global_generator_is_left_alone(self):
        model = network()
        before = torch.get_rng_state()
        fit(model, Chunks(), optimizer("nvrm-sgd", model), epochs=1)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("wrong", "word"),
        [
            ({"epochs": -1}, "epochs must be"),
            ({"epochs": 1.5}, "epochs must be"),
            ({"clip": -1.0}, "clip must be"),
            ({"clip": math.nan}, "clip must be"),
            ({"accumulate": 0}, "accumulate must be"),
            ({"precision": "fp8"}, "precision must be one of"),
            ({"batches": Chunks(0)}, "batches is empty"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_bad_arguments_get_a_sentence(self, wrong, word):
        model = network()
        arguments = {"epochs": 1, "batches": Chunks()} | wrong
        with pytest.raises(ValueError, match=word):
            fit(model, optimizer=optimizer("sgd", model), **arguments)
        assert same(state(model), state(network()))

    def test_what_cannot_work_is_refused(self):
        model = network()
        opt = optimizer("sam-sgd", model)
        with pytest.raises(ValueError, match="penalty SI needs one gradient"):
            fit(model, Chunks(), opt, epochs=1, penalty=SI(1.0))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
        with pytest.raises(ValueError, match="must not need a metric"):
            fit(model, Chunks(), opt, epochs=1, schedule=plateau)
        with pytest.raises(ValueError, match="model has no parameters"):
            fit(nn.Tanh(), Chunks(), opt, epochs=1)

    def test_a_gradient_scaler_that_leaves_a_step_out_brings_sam_down(self, tmp_path):
        """The climb is finite and the second gradient is not: weights stay, and go on from there.

        Where the climb ends the gradient, times the scale, is infinite; the step is left out.
        """

        class Root(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.tensor([0.5]))

            def forward(self, x):
                return (torch.where(self.weight < 0.2, -1e38, -1.0) * self.weight).view(1, 1)

        class One:
            def __len__(self):
                return 1

            def epoch(self, number, *, start=0):
                yield from [(torch.zeros(1), torch.zeros(1))][start:]

        model = Root()
        opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5)
        result = fit(
            model, One(), opt, epochs=3, loss=lambda scores, _: scores.sum(), precision="fp16",
            checkpoint=Checkpoint(tmp_path / "c.pt", every=0),
        )  # fmt: skip
        assert result.curves["loss"] == [-0.5] * 3
        assert model.weight.item() == 0.5


class TestByName:
    def test_the_kinds(self):
        model = network()
        kinds = {n: type(optimizer(n, model)) for n in OPTIMIZERS}
        assert kinds["psgd"] is PSGD
        assert kinds["sgld"] is SGLD
        for name in ("sgd", "adam", "adamw"):
            plain = getattr(torch.optim, {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[name])
            assert kinds[name] is plain
            assert kinds[f"nvrm-{name}"] is NVRM
            assert kinds[f"sam-{name}"] is SAM
            for kind in ("nvrm", "sam"):
                assert type(optimizer(f"{kind}-{name}", model).inner) is plain
        assert len(OPTIMIZERS) == 11

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_every_option_arrives(self, name):
        group = optimizer(name, network()).param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.05, 0.01)
        assert group.get("momentum", 0) == (0.9 if name.endswith(("sgd", "sgld")) else 0)
        if name.startswith("nvrm") or name in ("psgd", "sgld"):
            assert group["b"] == pytest.approx(0.1)
            assert group["drawn"][0] == 3 or 3 in group["drawn"]
        assert group.get("rho", 0) == (0.1 if name.startswith("sam") else 0)

    @pytest.mark.parametrize(
        ("name", "option"),
        [("adam", "momentum"), ("nvrm-adam", "momentum"), ("sgd", "b"), ("sam-sgd", "b"),
         ("sgd", "noise"), ("sgld", "noise"), ("sgd", "rho"), ("nvrm-sgd", "rho")],
    )  # fmt: skip
    def test_an_option_that_would_be_ignored_is_refused(self, name, option):
        value = {"noise": "uniform"}.get(option, 0.1)
        with pytest.raises(ValueError, match=f"{name} has no {option}"):
            make_optimizer(name, network().parameters(), lr=0.1, **{option: value})

    def test_an_unknown_name(self):
        with pytest.raises(ValueError, match="optimizer must be one of sgd, adam"):
            make_optimizer("rmsprop", network().parameters(), lr=0.1)

    def test_the_family_of_the_noise(self):
        opt = make_optimizer("nvrm-sgd", network().parameters(), lr=0.1, b=0.1, noise="laplace")
        assert opt.param_groups[0]["noise"] == "laplace"

    def test_a_path_is_a_checkpoint(self, tmp_path):
        model = network()
        fit(model, Chunks(), optimizer("sgd", model), epochs=1, checkpoint=tmp_path / "c.pt")
        assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
        with pytest.raises(ValueError, match="every must be"):
            Checkpoint(tmp_path / "c.pt", every=math.nan)


def test_an_optimizer_of_another_model():
    with pytest.raises(ValueError, match="optimizer has no parameter of model"):
        fit(network(), Chunks(), optimizer("nvrm-sgd", network()), epochs=1)


@pytest.mark.parametrize("name", ["measure", "measure_perturbed"])
def test_a_measure_that_returns_a_number(name):
    model = network()
    with pytest.raises(
        ValueError, match=f"{name} must return a dict of names and numbers, got 0.5"
    ):
        fit(model, Chunks(), optimizer("nvrm-sgd", model), epochs=1, **{name: lambda _: 0.5})
