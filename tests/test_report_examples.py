"""Six claims with invented results: borne out, refuted, undecided, in part, diverged, not run."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import numpy as np

from neuvar.experiments.experiment import Experiment
from neuvar.experiments.findings import Case, Cell, Line, Panel, Table, Verdict, gain, judge
from neuvar.experiments.run_spec import Tasks, Training, as_dict

OWN_TRIALS = {"smoke": 1, "cpu": 3, "paper": 5}
RATES = (0.1, 0.2, 0.3, 0.4)
SCALES_OF_NOISE = (0.01, 0.012, 0.014, 0.016, 0.018, 0.02)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{$ | _x_ \x00"


def trained(b, seed, **settings):
    """A run of the image experiments."""
    return (
        Training(data="cifar10", model="resnet34", momentum=0.9, lr=0.1, epochs=40, b=b, seed=seed)
        if not settings
        else replace(trained(b, seed), **settings)
    )


def of_trials(make):
    """What an experiment's ``runs`` is, from a function of scale and seed."""

    def runs(scale, trials):
        return [run for seed in range(trials or OWN_TRIALS[scale]) for run in make(scale, seed)]

    return runs


def method(run):
    name = "NVRM" if run.b else "SGD"
    return f"{name}, b = {run.b:g}" if run.b else name


def role(run):
    return "nvrm" if run.b else "plain"


def lines_of(results, curve, x):
    """A line for each method, in the order of the results."""
    found = {}
    for result in results:
        found.setdefault((method(result.run), role(result.run)), []).append(
            tuple(result.line["curves"].get(curve, ()))
        )
    return tuple(Line(label, tuple(x), tuple(rows), who) for (label, who), rows in found.items())


def by_seed(results, metric, b):
    return {r.run.seed: r.last(metric) for r in results if r.finished and (r.run.b > 0) == (b > 0)}


def compared(metric, least=0.0):
    def check(results):
        found = gain(by_seed(results, metric, 1), by_seed(results, metric, 0))
        return judge("Gain", [Case("all", tuple(x - least for x in found))])

    return check


def numbers(metric, group=lambda run: ()):
    """A table with the last and the best epoch, and n."""

    def table(results):
        found = {}
        for result in results:
            found.setdefault((*group(result.run), method(result.run)), []).append(result)
        rows = []
        for key, some in found.items():
            done = [r for r in some if r.finished]
            last, best = (
                tuple(getattr(r, when)(metric) for r in done) for when in ("last", "best")
            )
            rows.append((*key, Cell(last), Cell(best), str(len(done))))
        first = ("wrong labels",) if len(rows[0]) == 5 else ()
        return Table((*first, "method", "last epoch", "best epoch", "n"), tuple(rows))

    return table


def flip_panels(results):
    rates = sorted({r.run.noise_rate for r in results})
    return [
        Panel(
            f"{100 * rate:.0f} % pair flips",
            "epoch",
            "test accuracy",
            lines_of([r for r in results if r.run.noise_rate == rate], "test", range(1, 41)),
        )
        for rate in rates
    ]


def lr_panels(results):
    lrs = sorted({r.run.lr for r in results})
    return [
        Panel(
            f"Learning rate {lr:g}",
            "epoch",
            "test accuracy",
            lines_of([r for r in results if r.run.lr == lr], "test", range(1, 41)),
        )
        for lr in lrs
    ]


def one_panel(title, x_label, x, curve="test", **options):
    def panels(results):
        return [Panel(title, x_label, "test accuracy", lines_of(results, curve, x), **options)]

    return panels


def two_panels(results):
    x = range(1, 6)
    return [
        Panel("The first task", "tasks learned", "test accuracy", lines_of(results, "first", x)),
        Panel("All tasks so far", "tasks learned", "test accuracy", lines_of(results, "mean", x)),
    ]


def tasks(b, seed, **settings):
    return Tasks(data="mnist", optimizer="adam", lr=1e-3, batch=256, b=b, seed=seed, **settings)


def experiment(*values):
    """An experiment from its values in this order."""
    names = [
        "name",
        "number",
        "title",
        "sentence",
        "source",
        "runs",
        "settings",
        "panels",
        "table",
        "check",
    ]
    return Experiment(**dict(zip(names, values, strict=True)))


def claims():
    """The experiments, in the order of the report."""
    said = {
        "smoke": "Two epochs on five hundred images.",
        "cpu": "10,000 images instead of 50,000, 40 epochs instead of 300.\nBatch 128, lr 0.1.",
        "paper": "The paper's own settings: 300 epochs, batch 128, lr 0.1 divided by ten.",
    }
    return [
        experiment(
            "robustness",
            "1",
            "Robustness to weight noise",
            "Networks trained with NVRM keep their accuracy when weights are perturbed, while "
            "those trained with SGD collapse.",
            "section 4.1, figure 2",
            of_trials(
                lambda scale, s: [
                    trained(
                        b, s, eval_noise=SCALES_OF_NOISE, epochs=300 if scale == "paper" else 40
                    )
                    for b in (0, 0.01, 0.03)
                ]
            ),
            said.get,
            one_panel("CIFAR-10, ResNet-34", "noise scale", SCALES_OF_NOISE, "noisy", log_x=True),
            numbers("test"),
            compared("noisy"),
        ),
        experiment(
            "pair-flips",
            "3",
            "Wrong labels that are memorized",
            "With NVRM the training error stops near the noise rate: wrong labels are not learned.",
            "section 4.3, figure 4",
            of_trials(
                lambda _, s: [
                    trained(b, s, label_noise="pair", noise_rate=rate, label_seed=s)
                    for rate in RATES
                    for b in (0, 0.05)
                ]
            ),
            said.get,
            flip_panels,
            numbers("test", lambda run: (f"{100 * run.noise_rate:.0f} %",)),
            lambda found: compared("test")([r for r in found if r.run.noise_rate == 0.2]),
        ),
        experiment(
            "forgetting",
            "4a",
            "Forgetting of earlier tasks",
            "NVRM-Adam forgets less than Adam when tasks follow one another.",
            "section 4.4, figure 5",
            of_trials(lambda _, s: [tasks(b, s) for b in (0, 0.03, 0.05)]),
            said.get,
            two_panels,
            numbers("mean"),
            compared("mean"),
        ),
        experiment(
            "ewc",
            "4b",
            "Elastic weight consolidation with variability",
            "NVRM and EWC together are better than EWC alone.",
            "appendix C, figure 9",
            of_trials(lambda _, s: [tasks(b, s, penalty="ewc", strength=300.0) for b in (0, 0.03)]),
            said.get,
            two_panels,
            numbers("mean"),
            compared("mean"),
        ),
        experiment(
            "split",
            "4c",
            "Tasks with heads of their own",
            "On split MNIST, too, NVRM forgets less.",
            "section 4.4",
            of_trials(lambda _, s: [tasks(b, s, stream="split") for b in (0, 0.03)]),
            said.get,
            two_panels,
            numbers("mean"),
            compared("mean"),
        ),
        experiment(
            "gradient-noise",
            "S",
            "Large gradient noise instead",
            "A larger learning rate alone does not keep SGD from memorizing.",
            "supplement",
            of_trials(
                lambda _, s: [
                    trained(b, s, lr=lr, label_noise="pair", noise_rate=0.4)
                    for lr in (0.1, 0.3, 3.0)
                    for b in (0, 0.05)
                ]
            ),
            said.get,
            lr_panels,
            numbers("test", lambda run: (f"lr {run.lr:g}",)),
            lambda results: Verdict(
                "undecided", "+1.2 points (n = 3, 95 % interval -4.0 to +6.4)."
            ),
        ),
    ]


def recorded(run, *, machine="a laptop"):
    """The line of a run, with numbers that depend on what varies here."""
    what = [str(getattr(run, name, "")) for name in ("b", "lr", "noise_rate", "epochs", "penalty")]
    rng = np.random.default_rng([run.seed, zlib.crc32("/".join(what).encode())])
    x = np.arange(1, 41)
    rise = 1 - np.exp(-x / 6)
    if isinstance(run, Tasks):
        step = np.arange(5)
        lost = {0: 0.14, 0.03: 0.07, 0.05: 0.04}[run.b]
        if run.penalty:
            lost = 0.016 if run.b else 0.008
        first = 0.97 - lost * step + rng.normal(0, 0.01, 5)
        curves = {"first": first, "mean": 0.97 - 0.5 * lost * step + rng.normal(0, 0.004, 5)}
    else:
        learned = 0.92 - (0.1 * run.noise_rate if run.b else 0)
        fall = 0 if run.b else run.noise_rate * np.clip((x - 12) / 20, 0, 1) ** 1.5
        curves = {"test": learned * rise - fall + rng.normal(0, 0.008, 40)}
        if run.eval_noise:
            tough = {0: 0.9, 0.01: 0.35, 0.03: 0.08}[run.b]
            noise = np.array(run.eval_noise)
            curves["noisy"] = 0.93 - tough * ((noise - 0.009) / 0.011) + rng.normal(0, 0.02, 6)
    diverged = getattr(run, "lr", 0) == 3.0 and not run.b and run.seed != 1
    if diverged:
        curves = {name: curve[: 4 + run.seed] for name, curve in curves.items()}
    return {
        "key": run.key,
        "run": as_dict(run),
        "status": "diverged" if diverged else "finished",
        "reason": "the loss was nan in epoch 5" if diverged else None,
        "curves": {name: curve.tolist() for name, curve in curves.items()},
        "last": {name: float(curve[-1]) for name, curve in curves.items()},
        "best": {name: float(curve.max()) for name, curve in curves.items()},
        "seconds": 97.5,
        "versions": {"python": "3.11.2", "neuvar": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
        "commit": "da0b3d31f00dda0b3d31f00d",
        "machine": {"cpu": machine, "cores": 2},
        "device": "cpu",
        "threads": 2,
        "when": f"2026-03-{1 + run.seed:02}T10:00:00+00:00",
    }


def results():
    """All lines by scale: some runs are missing, one claim has none."""
    found = {}
    for experiment in claims():
        for scale in ("cpu", "paper") if experiment.name == "robustness" else ("cpu",):
            runs = experiment.runs(scale, 0)
            if experiment.name == "split":
                runs = []
            if experiment.name == "pair-flips":
                runs = [run for run in runs if run.seed < 2 or run.noise_rate < 0.3]
            for run in runs:
                found.setdefault(scale, {})[run.key] = recorded(run)
    return found


def test_examples_are_as_different_as_they_claim():
    lines = results()
    assert set(lines) == {"cpu", "paper"}
    assert {line["status"] for line in lines["cpu"].values()} == {"finished", "diverged"}
    assert all(math.isfinite(v) for line in lines["cpu"].values() for v in line["last"].values())
    assert len(claims()) == 6
