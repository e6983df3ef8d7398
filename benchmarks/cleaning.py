"""How well are wrong labels found, and how much does correcting them help? Beside cleanlab.

    python benchmarks/cleaning.py [--seeds 3] [--rows NAME ...] [--table]

One run with neural variability and ``b="auto"`` (:func:`neuvar.find_label_issues`) against cleanlab
on probabilities of five-fold cross-validation with plain SGD: the same network, epochs and
settings, five trainings instead of one. cleanlab ranks by its own default, the label's probability,
and by the margin. It is also given the probabilities of our one run.
Then the network is trained with plain SGD on the labels as given, on the true ones, and on those
that each way has corrected. It goes on where it was stopped; results are in results/cleaning.jsonl,
tables in results/cleaning.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuvar.cleaning import Examples, LabelIssues, judge_labels
from neuvar.cleaning.training import Trained, train_once
from neuvar.data import Batches, load, normalization
from neuvar.engine import Results, sweep
from neuvar.experiments.run_spec import Training
from neuvar.labels import corrupt
from neuvar.models import build
from neuvar.train.evaluation import autocast
from spread import spread, unbroken

FOLDS = 5
FIRST_SEED = 10
"""Seeds below were looked at when the method was made."""
RESULTS = Path(__file__).parents[1] / "results"
MNIST = {"data": "mnist", "images": 10_000, "model": "mlp", "epochs": 30}
CIFAR = {"data": "cifar10", "images": 10_000, "model": "resnet-10", "width": 16, "epochs": 30}
KINDS = {"pair": "pair", "sym": "symmetric", "instance": "instance"}
SETS = {"mnist": ("MNIST", MNIST), "cifar": ("CIFAR-10", CIFAR)}
ROWS = (
    "mnist-pair-20", "mnist-pair-40", "mnist-sym-20", "mnist-sym-40", "mnist-sym-60",
    "mnist-instance-40", "cifar-pair-40", "cifar-sym-40",
)  # fmt: skip
MEASURES = ("auroc", "average_precision", "precision", "recall", "rate_error")


def runs(row: str, seeds: int) -> list[Training]:
    """For each seed: with neural variability, with plain SGD in five folds, and on true labels.

    The last one is the same in all rows of a data set.
    """
    data, kind, rate = row.split("-")
    common = SETS[data][1] | {"momentum": 0.9, "precision": "bf16"}
    noise = {"label_noise": KINDS[kind], "noise_rate": int(rate) / 100}
    ways: tuple[dict[str, Any], ...] = (
        noise | {"optimizer": "nvrm-sgd", "auto_b": True},
        noise | {"optimizer": "sgd"},
        {"optimizer": "sgd", "label_noise": "", "noise_rate": 0.0},
    )
    return [
        Training(**common, **way, seed=seed, label_seed=seed)
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for way in ways
    ]


def title(row: str) -> str:
    """A row in words, which stay in one line of a table."""
    data, kind, rate = row.split("-")
    words = f"{SETS[data][0]}, {KINDS[kind]} {rate} %"
    return words.replace(" ", "\N{NO-BREAK SPACE}").replace("-", "\N{NON-BREAKING HYPHEN}")


# Runs.


def run_one(run: Training, *, progress: Any = None, **_: Any) -> dict[str, Any]:
    """Find the wrong labels of a run's data in its way, and train on what comes out."""
    began, done = time.perf_counter(), Trainings(run, progress)
    found: dict[str, Any] = {}
    if not run.label_noise:
        found["true"] = {"accuracy": done.accuracy(done.true)}
    elif run.auto_b:
        p = done.train(done.given).probabilities
        ours = judge_labels(p, done.given.labels, history=True)
        theirs = by_cleanlab(p, done.given.labels)
        found["ours"] = judged(ours, done) | {"accuracy": done.accuracy(ours.cleaned)}
        found["cleanlab on ours"] = judged(theirs, done)
    else:
        p = done.in_folds()
        theirs = by_cleanlab(p, done.given.labels)
        found["cleanlab"] = judged(theirs, done) | {"accuracy": done.accuracy(theirs.cleaned)}
        margin = replace(theirs, quality=by_margin(p, done.given.labels))
        found["cleanlab, by margin"] = judged(margin, done)
        found["given"] = {"accuracy": done.accuracy(done.given.labels)}
    return {
        "status": "finished",
        "reason": None,
        "curves": {},
        "last": found,
        "noise_rate": float((done.given.labels != done.true).mean()),
        "trainings": done.count,
        "seconds": round(time.perf_counter() - began, 2),
    }


class Trainings:
    """The trainings that one run takes, all with the same network, epochs and settings."""

    def __init__(self, run: Training, progress: Any) -> None:
        data = load(run.data)
        images = data.train.images[: run.images]
        self.run, self.progress, self.count = run, progress, 0
        self.true = data.train.labels[: run.images].numpy()
        names = tuple(str(k) for k in range(data.classes))
        self.given = Examples(images, given_labels(run, images, self.true, len(names)), names)
        self.test = Examples(data.test.images, data.test.labels.numpy(), names)

    def train(self, examples: Examples, *, plain: bool = False, seed: int = 0) -> Trained:
        """One training, with neural variability or plain."""
        run, images = self.run, self.given.inputs
        shape = tuple(images.shape[1:])
        network = build(
            run.model,
            classes=len(examples.names),
            seed=run.seed + seed,
            width=run.width or None,
            shape=shape if len(shape) == 3 else (1, *shape),
        )
        self.count += 1
        if images.ndim == 4:
            network = network.to(memory_format=torch.channels_last)
        return train_once(
            network,
            examples,
            b=0.0 if plain else "auto",
            epochs=run.epochs,
            batch_size=run.batch,
            lr=run.lr,
            momentum=run.momentum,
            weight_decay=run.weight_decay,
            seed=run.seed + seed,
            device="cpu",
            precision=run.precision,
            progress=self.report_progress,
        )

    def report_progress(self, share: float) -> None:
        whole = 2 if self.run.auto_b else FOLDS + 2 if self.run.label_noise else 1
        if self.progress is not None:
            self.progress(min(1.0, (self.count - 1 + share) / whole))

    def in_folds(self) -> np.ndarray:
        """Probabilities of each example from a network that has not seen it."""
        labels, n = self.given.labels, len(self.given.labels)
        # Each class is spread over the folds alike.
        shuffled = np.random.default_rng(self.run.seed).permutation(n)
        fold = np.empty(n, dtype=np.int64)
        fold[shuffled[np.argsort(labels[shuffled], kind="stable")]] = np.arange(n) % FOLDS
        found = np.zeros((n, len(self.given.names)))
        for k in range(FOLDS):
            part, rest = (
                replace(self.given, inputs=self.given.inputs[rows], labels=labels[rows])
                for rows in (fold != k, fold == k)
            )
            model = self.train(part, plain=True).model
            found[fold == k] = self.predicted(model, part, rest)
        return found

    def predicted(self, model: torch.nn.Module, part: Examples, rest: Examples) -> np.ndarray:
        """Probabilities of examples, normalized as those that the network was trained on were."""
        batches = Batches((rest.inputs,), 500, shuffle=False, normalize=normalization(part.inputs))
        model.eval()
        with torch.no_grad(), autocast(torch.device("cpu"), self.run.precision):
            scores = torch.cat([model(inputs).float() for (inputs,) in batches])
        return scores.double().softmax(1).numpy()

    def accuracy(self, labels: np.ndarray) -> float:
        """Test accuracy after plain training on some labels."""
        model = self.train(replace(self.given, labels=labels), plain=True, seed=1000).model
        p = self.predicted(model, self.given, self.test)
        return float((p.argmax(1) == self.test.labels).mean())


def given_labels(run: Training, images: Tensor, true: np.ndarray, classes: int) -> np.ndarray:
    """The labels that a run is given: true ones, or some of them changed."""
    if not run.label_noise:
        return true
    needs = {}
    if run.label_noise == "instance":
        pixels = images.flatten(1).float() / 255
        needs["features"] = pixels - pixels.mean(0)
    how = {"classes": classes, "seed": run.label_seed} | needs
    return corrupt(run.label_noise, true, run.noise_rate, **how).noisy.numpy()


def by_cleanlab(p: np.ndarray, labels: np.ndarray) -> LabelIssues:
    """What cleanlab makes of probabilities, with its own defaults."""
    from cleanlab.count import compute_confident_joint, estimate_joint
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    ours = judge_labels(p, labels)
    joint = estimate_joint(labels, p, confident_joint=compute_confident_joint(labels, p))
    rate = 1 - float(np.trace(joint))
    return replace(
        ours,
        quality=get_label_quality_scores(labels, p),
        flagged=np.asarray(find_label_issues(labels, p, n_jobs=1)),
        suggested=p.argmax(1),
        suggestion_probability=np.ones(len(labels)),  # all that it flags is replaced
        noise_rate=replace(ours.noise_rate, value=rate, low=math.nan, high=math.nan),
    )


def by_margin(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    from cleanlab.rank import get_label_quality_scores

    return np.asarray(get_label_quality_scores(labels, p, method="normalized_margin"))


def judged(found: LabelIssues, done: Trainings) -> dict[str, float]:
    """How right a judgement of labels is."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    wrong = done.given.labels != done.true
    flagged = found.flagged
    return {
        "auroc": float(roc_auc_score(wrong, -found.quality)),
        "average_precision": float(average_precision_score(wrong, -found.quality)),
        "precision": float(wrong[flagged].mean()) if flagged.any() else math.nan,
        "recall": float(flagged[wrong].mean()),
        "rate_error": found.noise_rate.value - float(wrong.mean()),
        "wrong_after": float((found.cleaned != done.true).mean()),
    }


# Tables.


def collected(path: Path) -> dict[str, dict[str, dict[int, dict[str, float]]]]:
    """Row, way, seed: numbers."""
    lines = Results(path).lines()
    found: dict[str, Any] = {}
    for row in ROWS:
        for run in runs(row, 20):
            if run.key in lines:
                for way, numbers in lines[run.key]["last"].items():
                    found.setdefault(row, {}).setdefault(way, {})[run.seed] = numbers
    return found


def head(*columns: str, text: int) -> list[str]:
    """Head of a table whose first columns are text."""
    rule = " --- |" * text + " ---: |" * (len(columns) - text)
    return [f"| {' | '.join(columns)} |", f"|{rule}"]


def table(path: Path) -> str:
    """Markdown: how labels are judged, and what training on corrected ones gives."""
    found = collected(path)
    parts = [
        ["## Finding wrong labels", "", *judgements(found)],
        ["## neuvar minus cleanlab, paired by seed", "", *differences(found)],
        ["## Training again: test accuracy in %", "", *trainings(found)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


NAMES = {"ours": "neuvar", "cleanlab on ours": "cleanlab on neuvar's"}


def judgements(found: Any) -> list[str]:
    columns = (
        "AUROC",
        "average precision",
        "precision",
        "recall",
        "error of the estimated noise rate",
    )
    lines = head("labels", "method", "n", *columns, text=2)
    for row, ways in found.items():
        ways_shown = (("ours", 1), ("cleanlab", FOLDS), ("cleanlab, by margin", FOLDS))
        for way, cost in (*ways_shown, ("cleanlab on ours", 1)):
            seeds = ways.get(way, {})
            cells = [spread((s[m] for s in seeds.values()), 3) for m in MEASURES]
            name = f"{NAMES.get(way, way)}, {cost} run{'s' * (cost > 1)}"
            measured = " | ".join(map(unbroken, cells))
            lines.append(f"| {title(row)} | {unbroken(name)} | {len(seeds)} | {measured} |")
    return lines


def differences(found: Any) -> list[str]:
    columns = ("labels", "against", "n", "AUROC", "average precision", "beyond two standard errors")
    lines = head(*columns, text=2)
    for row, ways in found.items():
        for other in ("cleanlab", "cleanlab, by margin"):
            seeds = sorted(ways.get("ours", {}).keys() & ways.get(other, {}).keys())
            if len(seeds) < 2:
                continue
            said, cells = [], []
            for measure in MEASURES[:2]:
                gains = [ways["ours"][s][measure] - ways[other][s][measure] for s in seeds]
                mean = statistics.fmean(gains)
                error = statistics.stdev(gains) / math.sqrt(len(gains))
                cells.append(f"{mean:+.3f} ± {error:.3f} (s.e.)")
                sure = abs(mean) > 2 * error
                said.append(("above" if mean > 0 else "below") if sure else "equal")
            said_of = [title(row), other, str(len(seeds)), *cells, ", ".join(said)]
            lines.append(f"| {' | '.join(said_of)} |")
    return lines


def trainings(found: Any) -> list[str]:
    corrected = ("corrected by cleanlab", "corrected by neuvar")
    closed = ("gap closed by cleanlab", "gap closed by neuvar")
    lines = head("labels", "n", "given labels", *corrected, "true labels", *closed, text=1)
    order = ("given", "cleanlab", "ours", "true")
    for row, ways in found.items():
        seeds = sorted(set.intersection(*(set(ways.get(way, {})) for way in order)))
        if not seeds:
            continue
        numbers = {w: [ways[w][s]["accuracy"] for s in seeds] for w in order}
        ends = list(zip(numbers["given"], numbers["true"], strict=True))
        cells = [unbroken(spread(numbers[w], 1, factor=100)) for w in order]
        for way in ("cleanlab", "ours"):
            low, high = (statistics.fmean(side) for side in zip(*ends, strict=True))
            gain = statistics.fmean(numbers[way]) - low
            cells.append(f"{gain / (high - low):.2f}" if high > low else "–")
        lines.append(f"| {title(row)} | {len(seeds)} | {' | '.join(cells)} |")
    return lines


def print_event(event: Any) -> None:
    if event.kind != "progress":
        run = event.run
        what = (run.data, run.label_noise, run.noise_rate, run.optimizer, f"seed {run.seed}")
        print(event.kind, *what, event.message or "", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.results / "cleaning.jsonl"
    if not options.table:
        every = dict.fromkeys(run for row in options.rows for run in runs(row, options.seeds))
        print(sweep(list(every), path, workers=options.workers, run_one=run_one, watch=print_event))
    text = table(path)
    (options.results / "cleaning.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
