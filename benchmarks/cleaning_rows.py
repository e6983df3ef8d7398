"""Find wrong labels in images, tables and texts: neuvar, cleanlab, AUM, dropout and neighbours.

    python benchmarks/cleaning_rows.py [--files FOLDER] [--cifar10n FILE] [--hausa FOLDER]
        [--seeds 5] [--workers 2] [--rows NAME ...] [--tiny] [--table]

Each method finds the wrong labels of each row, with five seeds:

- neuvar: what ``find_label_issues`` does by default; for text, what ``neuvar clean`` does;
- noise: the same with weight noise, ``b="auto"``; not for text;
- plain and half: the same by plain SGD, for all epochs and, as SAM, for half of them; not for text;
- cleanlab: the same network without noise, or the same linear model, in five folds;
- AUM: mean margin of the logits over one plain training; labels with a negative margin are flagged;
- dropout: mean probabilities over one training with dropout 0.5, judged by neuvar's rule;
- neighbours: votes of the ten nearest neighbours, as in cleanlab's Datalab, judged by cleanlab.

Measured are the ranking, the flags, how far their stated precision is off, labels after the default
correction, test accuracy after training on given and on corrected labels, and the cost.

The data sets that the package does not ship are named by options: ``--files``, the .npz files of
cleanlab's benchmark (see judgement.py); ``--cifar10n``, the aggregate labels of CIFAR-10N; and
``--hausa``, news titles in Hausa with clean and noisy labels. Without an option its rows are left
out. The second set of texts are docstrings of installed packages.

About two hours on two cores. Finished jobs are skipped, so the same command continues; one line per
job is in results/cleaning_rows.jsonl, tables in results/cleaning_rows.md.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import inspect
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from cleaning import by_cleanlab
from neuvar.cleaning import Examples, LabelIssues, find_label_issues, judge_labels
from neuvar.cleaning.training import make_batches, network_for, train_once
from neuvar.data import Batches, load, normalization
from neuvar.engine import Results
from neuvar.engine.job import provenance
from neuvar.labels import cifar10n, corrupt
from neuvar.train import fit
from neuvar.train.evaluation import autocast
from spread import spread, unbroken
from wrong_labels import margin

RESULTS = Path(__file__).parents[1] / "results"
FIRST_SEED, FOLDS, NEIGHBOURS, DROPOUT = 10, 5, 10, 0.5
TRAINING = {"batch_size": 128, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "device": "cpu"}
METHODS = ("neuvar", "cleanlab", "AUM", "dropout", "neighbours", "noise", "plain", "half")
NOT_FOR_TEXT = ("noise", "plain", "half")
PACKAGES = ("numpy", "torch", "sklearn", "matplotlib")
Array = np.ndarray[Any, np.dtype[Any]]
Line = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Data and their errors; ``kind`` is empty if the data have real ones."""

    title: str
    data: str
    kind: str = ""
    rate: float = 0.0
    images: int = 0
    epochs: int = 30
    precision: str = "float32"


def _images(data: str, title: str, kind: str = "", rate: float = 0.0) -> Row:
    large = data == "cifar10"
    count, epochs = (8000, 10) if large else (10_000, 12)
    return Row(f"{title}, {kind} {rate:.0%}" if kind else title, data, kind, rate, count, epochs,
               "bf16")  # fmt: skip


ROWS = {
    "mnist-pair-20": _images("mnist", "MNIST", "pair", 0.2),
    "mnist-pair-40": _images("mnist", "MNIST", "pair", 0.4),
    "mnist-sym-20": _images("mnist", "MNIST", "symmetric", 0.2),
    "mnist-sym-40": _images("mnist", "MNIST", "symmetric", 0.4),
    "mnist-sym-60": _images("mnist", "MNIST", "symmetric", 0.6),
    "mnist-instance-40": _images("mnist", "MNIST", "instance", 0.4),
    "cifar-pair-40": _images("cifar10", "CIFAR-10", "pair", 0.4),
    "cifar-sym-40": _images("cifar10", "CIFAR-10", "symmetric", 0.4),
    "cifar-10n": _images("cifar10", "CIFAR-10N aggregate"),
    "digits": Row("digits, symmetric 15%", "digits", "symmetric", 0.15),
    "cancer": Row("cancer, symmetric 15%", "cancer", "symmetric", 0.15),
    "wine": Row("wine, pair 15%", "wine", "pair", 0.15),
    "docstrings": Row("docstrings, symmetric 15%", "docstrings", "symmetric", 0.15),
    "hausa-planted": Row("Hausa news, symmetric 15%", "hausa", "symmetric", 0.15),
    "hausa-rules": Row("Hausa news, labels by rules", "hausa"),
}
TABLES = {"digits": load_digits, "cancer": load_breast_cancer, "wine": load_wine}
TEXTS = ("docstrings", "hausa")


# Data.


@dataclass(frozen=True)
class Task:
    """Examples with the given labels, their true labels, and test examples with true ones."""

    given: Examples
    true: Array
    test: Examples


def read_task(row: Row, seed: int, options: dict[str, Any]) -> Task:
    x, true, test_x, test_y, names = read_data(row, seed, options)
    if row.kind:
        how = {"classes": len(names), "seed": seed}
        if row.kind == "instance":
            pixels = x.flatten(1).float() / 255
            how["features"] = pixels - pixels.mean(0)
        given = corrupt(row.kind, torch.as_tensor(true), row.rate, **how).noisy.numpy()
    elif row.data == "cifar10":
        whole = load("cifar10").train.labels
        given = cifar10n(options["cifar10n"], clean=whole).noisy.numpy()[: len(true)]
    else:
        given = read_titles(Path(options["hausa"]) / "train_clean_noisy_labels.tsv", names)[1]
    return Task(Examples(x, given, names), true, Examples(test_x, test_y, names))


def read_data(row: Row, seed: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """Inputs, true labels, test inputs, test labels and names of the classes."""
    if row.data in ("mnist", "cifar10"):
        data, names = load(row.data), tuple(str(k) for k in range(10))
        train, test, n = data.train, data.test, row.images
        return train.images[:n], train.labels[:n].numpy(), test.images, test.labels.numpy(), names
    if row.data == "hausa":
        folder = Path(options["hausa"])
        names = tuple(sorted({label for _, label in titles(folder / "train_clean.tsv")}))
        (texts, y), (test_texts, test_y) = (
            read_titles(folder / file, names) for file in ("train_clean.tsv", "test.tsv")
        )
        return *vectors(texts, test_texts, y, test_y), names
    if row.data == "docstrings":
        texts, y = docstrings()
        part, rest = split(y, seed)
        of = [[texts[i] for i in rows] for rows in (part, rest)]
        return *vectors(*of, y[part], y[rest]), PACKAGES
    x, y = TABLES[row.data](return_X_y=True)
    part, rest = split(y, seed)
    x = (x - x[part].mean(0)) / np.maximum(x[part].std(0), 1e-9)
    inputs = torch.tensor(x, dtype=torch.float32)
    return inputs[part], y[part], inputs[rest], y[rest], tuple(map(str, np.unique(y)))


def split(y: Array, seed: int) -> tuple[Array, Array]:
    """Four fifths to train on, one to test on."""
    return next(StratifiedKFold(5, shuffle=True, random_state=seed).split(y, y))


def titles(path: Path) -> list[tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(row["news_title"], row["label"]) for row in rows]


def read_titles(path: Path, names: tuple[str, ...]) -> tuple[list[str], Array]:
    rows = titles(path)
    return [text for text, _ in rows], np.array([names.index(label) for _, label in rows])


@cache
def docstrings() -> tuple[list[str], Array]:
    """First paragraphs of public docstrings, and the package that each is from."""
    seen: dict[str, int] = {}
    for k, package in enumerate(PACKAGES):
        found: set[str] = set()
        for module in (package, *MODULES[package]):
            for _, value in inspect.getmembers(importlib.import_module(module)):
                text = (inspect.getdoc(value) or "") if callable(value) else ""
                paragraphs = [p for p in text.split("\n\n") if len(p.split()) > 5]
                if paragraphs and str(getattr(value, "__module__", "")).startswith(package):
                    found.add(" ".join(paragraphs[0].split())[:300])
        seen |= {text: k for text in sorted(found) if text not in seen}
    return list(seen), np.array(list(seen.values()))


MODULES = {
    "numpy": ("numpy.linalg", "numpy.fft", "numpy.ma", "numpy.random", "numpy.polynomial"),
    "torch": ("torch.nn", "torch.nn.functional", "torch.optim", "torch.distributions",
              "torch.utils.data"),
    "sklearn": ("sklearn.linear_model", "sklearn.metrics", "sklearn.ensemble", "sklearn.datasets",
                "sklearn.preprocessing", "sklearn.model_selection", "sklearn.decomposition",
                "sklearn.cluster", "sklearn.utils"),
    "matplotlib": ("matplotlib.pyplot", "matplotlib.patches", "matplotlib.ticker",
                   "matplotlib.colors", "matplotlib.artist", "matplotlib.transforms"),
}  # fmt: skip


def vectors(texts: Any, test_texts: Any, y: Array, test_y: Array) -> tuple[Any, ...]:
    """Texts as 300 numbers, fitted to the training texts."""
    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 5), sublinear_tf=True)
    train = ngrams.fit_transform(texts)
    svd = TruncatedSVD(min(300, train.shape[0] - 1), random_state=0).fit(train)
    x, z = (torch.tensor(svd.transform(m), dtype=torch.float32)
            for m in (train, ngrams.transform(test_texts)))  # fmt: skip
    return x, y, z, test_y


# Methods.


def run_job(job: dict[str, Any], options: dict[str, Any]) -> Line:
    """The line of one method on one row with one seed."""
    torch.set_num_threads(1)
    began = time.process_time()
    row = replace(ROWS[job["row"]], images=job["images"], epochs=job["epochs"])
    task = read_task(row, job["seed"], options)
    training = TRAINING | {
        "epochs": row.epochs,
        "precision": row.precision,
        "seed": job["seed"],
    }
    loaded = time.process_time()
    issues, trainings = FIND[job["method"]](task, row, training)
    found = {"trainings": trainings, "seconds": round(time.process_time() - loaded, 1)}
    found |= measures(issues, task)
    if job["method"] in ("neuvar", "cleanlab"):
        found["accuracy"] = accuracy(task, issues.cleaned, row, training)
    if job["method"] == "AUM":
        found["given_accuracy"] = accuracy(task, task.given.labels, row, training)
    line = {"key": json.dumps(job, sort_keys=True), "status": "finished", "run": job}
    total = round(time.process_time() - began, 1)
    return line | {"last": found, "seconds": total} | provenance("cpu", 1)


def with_neuvar(
    task: Task, row: Row, training: Any, b: float | str | None = None
) -> tuple[LabelIssues, int]:
    if row.data in TEXTS:
        data = task.given.inputs.numpy(), task.given.labels
        return find_label_issues(LogisticRegression(max_iter=1000), data), FOLDS
    network = network_for(task.given, seed=training["seed"])
    p = train_once(network, task.given, b=b, **training).probabilities
    return judge_labels(p, task.given.labels, history=True), 1


def with_noise(task: Task, row: Row, training: Any) -> tuple[LabelIssues, int]:
    return with_neuvar(task, row, training, b="auto")


def with_plain(task: Task, row: Row, training: Any) -> tuple[LabelIssues, int]:
    return with_neuvar(task, row, training, b=0.0)


def with_half(task: Task, row: Row, training: Any) -> tuple[LabelIssues, int]:
    return with_plain(task, row, training | {"epochs": -(-training["epochs"] // 2)})


def with_cleanlab(task: Task, row: Row, training: Any) -> tuple[LabelIssues, int]:
    x, y = task.given.inputs, task.given.labels
    p = np.zeros((len(y), len(task.given.names)))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=training["seed"])
    for part, rest in folds.split(y, y):
        train, test = (replace(task.given, inputs=x[rows], labels=y[rows]) for rows in (part, rest))
        p[rest] = fit_predict(train, test, row, training)
    return states_nothing(by_cleanlab(p, y)), FOLDS


def with_aum(task: Task, row: Row, training: Any) -> tuple[LabelIssues, int]:
    network = network_for(task.given, seed=training["seed"])
    labels, sums = torch.as_tensor(task.given.labels), torch.zeros(len(task.true))

    def add_margins(batch: tuple[Tensor, ...], scores: Tensor) -> None:
        sums[batch[2]] += margin(scores.float(), labels[batch[2]])

    how = {k: training[k] for k in ("lr", "momentum", "weight_decay")}
    optimizer = torch.optim.SGD(network.parameters(), **how)
    epochs = training["epochs"]
    batches = make_batches(task.given, 128, seed=training["seed"], device="cpu")
    fit(network.train(), batches, optimizer, epochs=epochs, loss=cross_entropy,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, -(-epochs // 3)),
        precision=training["precision"], observe=add_margins)  # fmt: skip
    aum = sums.numpy() / epochs
    y, classes = task.given.labels, len(task.given.names)
    nothing = judge_labels(np.full((len(y), classes), 1 / classes), y)  # corrects nothing
    return states_nothing(nothing, quality=aum, flagged=aum < 0), 1


def states_nothing(issues: LabelIssues, **values: Array) -> LabelIssues:
    """Issues of a method that does not say how likely a flag is right."""
    return replace(issues, error_probability=np.full(len(issues), math.nan), **values)


def with_dropout(task: Task, row: Row, training: Any) -> tuple[LabelIssues, int]:
    network = network_for(task.given, seed=training["seed"])
    if isinstance(layers := getattr(network, "layers", None), nn.Sequential):
        relus = ([x, nn.Dropout(DROPOUT)] if isinstance(x, nn.ReLU) else [x] for x in layers)
        network.layers = nn.Sequential(*(layer for pair in relus for layer in pair))
    else:
        network.classifier = nn.Sequential(nn.Dropout(DROPOUT), network.classifier)
    p = train_once(network, task.given, b=0.0, **training).probabilities
    return judge_labels(p, task.given.labels, history=True), 1


def with_neighbours(task: Task, row: Row, training: Any) -> tuple[LabelIssues, int]:
    x, y = task.given.inputs.flatten(1).numpy(), task.given.labels
    model = KNeighborsClassifier(NEIGHBOURS + 1).fit(x, y)
    p = np.zeros((len(y), len(task.given.names)))
    p[:, model.classes_] = model.predict_proba(x) * (NEIGHBOURS + 1)
    p[np.arange(len(y)), y] -= 1  # each example is its own neighbour
    return states_nothing(by_cleanlab(p / NEIGHBOURS, y)), 0


FIND: dict[str, Callable[..., tuple[LabelIssues, int]]] = {
    "neuvar": with_neuvar,
    "cleanlab": with_cleanlab,
    "AUM": with_aum,
    "dropout": with_dropout,
    "neighbours": with_neighbours,
    "noise": with_noise,
    "plain": with_plain,
    "half": with_half,
}


def fit_predict(train: Examples, test: Examples, row: Row, training: Any) -> Array:
    """Probabilities of test examples by the row's plain model."""
    if row.data in TEXTS:
        model = LogisticRegression(max_iter=1000).fit(train.inputs.numpy(), train.labels)
        p = np.zeros((len(test), len(test.names)))
        p[:, model.classes_] = model.predict_proba(test.inputs.numpy())
        return p
    network = network_for(train, seed=training["seed"])
    model = train_once(network, train, b=0.0, **training).model.eval()
    batches: Any = [(inputs,) for inputs in test.inputs.split(500)]
    if train.inputs.dtype == torch.uint8:  # normalized as those of the training were
        normalize = normalization(train.inputs)
        batches = Batches((test.inputs,), 500, shuffle=False, normalize=normalize)
    with torch.no_grad(), autocast(torch.device("cpu"), training["precision"]):
        scores = [model(inputs).float() for (inputs,) in batches]
    return softmax(torch.cat(scores).double(), 1).numpy()


def accuracy(task: Task, labels: Array, row: Row, training: Any) -> float:
    """Test accuracy of the plain model, trained on some labels."""
    other = training | {"seed": training["seed"] + 1000}
    p = fit_predict(replace(task.given, labels=np.asarray(labels)), task.test, row, other)
    return float((p.argmax(1) == task.test.labels).mean())


def measures(issues: LabelIssues, task: Task) -> dict[str, float]:
    wrong, flagged = task.given.labels != task.true, issues.flagged
    hits = int((wrong & flagged).sum())
    stated = issues.error_probability[flagged]
    precision = hits / int(flagged.sum()) if flagged.any() else math.nan
    return {
        "auroc": float(roc_auc_score(wrong, -issues.quality)),
        "average_precision": float(average_precision_score(wrong, -issues.quality)),
        "f1": 2 * hits / max(1, int(wrong.sum() + flagged.sum())),
        "precision": precision,
        "recall": hits / int(wrong.sum()),
        "stated_precision": float(stated.mean()) if flagged.any() else math.nan,
        "wrong": float(wrong.mean()),
        "wrong_after": float((issues.cleaned != task.true).mean()),
    }


# Jobs and tables.


def jobs(rows: list[str], seeds: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """All jobs, one seed after the other."""
    sizes = {name: (600, 2) if tiny else (ROWS[name].images, ROWS[name].epochs) for name in rows}
    return [
        {"row": row, "method": method, "seed": seed, "images": images, "epochs": epochs}
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
        for row, (images, epochs) in sizes.items()
        for method in METHODS
        if method not in NOT_FOR_TEXT or ROWS[row].data not in TEXTS
    ]


def run_missing(todo: list[dict[str, Any]], results: Results, options: dict[str, Any]) -> None:
    done = results.lines()
    missing = [job for job in todo if json.dumps(job, sort_keys=True) not in done]
    workers = max(1, options["workers"])
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run_job, job, options): job for job in missing}
        for count, future in enumerate(as_completed(futures), 1):
            if future.exception():
                pool.shutdown(cancel_futures=True)
            line = future.result()
            results.add(line)
            last = line["last"]
            shown = f"AP {last['average_precision']:.3f} F1 {last['f1']:.3f} {line['seconds']} s"
            print(f"{count}/{len(missing)}", *futures[future].values(), shown, flush=True)


def table(path: Path) -> str:
    """Markdown: findings, and what correction does."""
    found: dict[tuple[str, str], dict[int, Line]] = {}
    for line in Results(path).lines().values():
        run = line["run"]
        found.setdefault((run["row"], run["method"]), {})[run["seed"]] = line["last"]
    return "\n\n".join(["## Finding", findings(found), "## Correcting", corrections(found)]) + "\n"


def findings(found: Any) -> str:
    head = ["row", "method", "n", "AUROC", "average precision", "F1", "precision", "recall",
            "stated minus real precision", "trainings", "CPU seconds"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for name, row in ROWS.items():
        some = {m: list(found[name, m].values()) for m in METHODS if (name, m) in found}
        for method, seeds in some.items():
            cells = [marked(some, method, key) for key in ("auroc", "average_precision", "f1")]
            cells += [number(seeds, key) for key in ("precision", "recall")]
            off = [s["stated_precision"] - s["precision"] for s in seeds
                   if s["stated_precision"] is not None and s["precision"] is not None]  # fmt: skip
            cells += [unbroken(spread(off, 2)), str(seeds[0]["trainings"])]
            cells.append(f"{statistics.fmean(s['seconds'] for s in seeds):.0f}")
            lines.append([row.title, method, str(len(seeds)), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(seeds: list[Line], key: str, factor: float = 1, digits: int = 3) -> str:
    values = [s[key] for s in seeds if s.get(key) is not None]
    return unbroken(spread(values, digits, factor=factor))


def marked(some: dict[str, list[Line]], method: str, key: str) -> str:
    """A measure, in bold if it is the best or within one standard error of the best."""
    means = {m: statistics.fmean(s[key] for s in seeds) for m, seeds in some.items()}
    first = max(means, key=lambda m: means[m])
    values = [s[key] for s in some[first]]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    text = number(some[method], key)
    return f"**{text}**" if means[method] >= means[first] - error else text


def corrections(found: Any) -> str:
    head = ["row", "n", "wrong labels, %", "after neuvar", "after cleanlab",
            "test accuracy on given labels, %", "on neuvar's", "on cleanlab's"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for name, row in ROWS.items():
        if not all((name, m) in found for m in ("neuvar", "cleanlab", "AUM")):
            continue
        ours, theirs, plain = (list(found[name, m].values()) for m in ("neuvar", "cleanlab", "AUM"))
        cells = [(ours, "wrong"), (ours, "wrong_after"), (theirs, "wrong_after"),
                 (plain, "given_accuracy"), (ours, "accuracy"), (theirs, "accuracy")]  # fmt: skip
        shown = [number(seeds, key, 100, 1) for seeds, key in cells]
        lines.append([row.title, str(len(ours)), *shown])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=Path, help="folder of .npz files of probabilities")
    parser.add_argument("--cifar10n", type=Path, help="aggregate labels of CIFAR-10N")
    parser.add_argument("--hausa", type=Path, help="folder of news titles")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tiny", action="store_true", help="only check that everything runs")
    parser.add_argument("--table", action="store_true", help="only write the tables")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    needs = {"cifar-10n": options.cifar10n, "hausa-planted": options.hausa,
             "hausa-rules": options.hausa}  # fmt: skip
    rows = [row for row in options.rows if needs.get(row, True)]
    path = options.results / "cleaning_rows.jsonl"
    if not options.table:
        chosen = {k: getattr(options, k) for k in ("cifar10n", "hausa", "workers")}
        run_missing(jobs(rows, options.seeds, tiny=options.tiny), Results(path), chosen)
    text = table(path)
    if options.files:
        import judgement

        text += "\n## Probabilities from files\n\n"
        text += judgement.table_of_files(judgement.from_files(options.files)) + "\n"
    (options.results / "cleaning_rows.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
