"""How well are labels judged from predicted probabilities? Beside all of cleanlab's methods.

    python benchmarks/judgement.py [--files FOLDER] [--sets 64] [--seed 1000]

Two parts, both without training a network, a few minutes in all:

1. The .npz files of FOLDER (probabilities, labels, wrong), for example those of
   cleanlab/label-error-detection-benchmarks: average precision of the ranking and F1 of the flags,
   for neuvar and for each of cleanlab's scores and filters.
2. Probabilities of scikit-learn classifiers (five-fold cross-validation) on data with planted
   errors of several kinds: the same, and whether what neuvar states is true: the precision of the
   flags, labels after the default correction, and the interval of the noise rate.

Writes results/judgement_files.md and results/judgement.md.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from neuvar.cleaning import judge_labels

SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
FILTERS = (
    "prune_by_noise_rate", "prune_by_class", "both", "confident_learning", "predicted_neq_given",
    "low_normalized_margin", "low_self_confidence",
)  # fmt: skip
NOISE = (
    ("symmetric", 0.02), ("symmetric", 0.1), ("symmetric", 0.3), ("pair", 0.1), ("pair", 0.3),
    ("random matrix", 0.2), ("hard examples", 0.05), ("hard examples", 0.2),
)  # fmt: skip
RESULTS = Path(__file__).parents[1] / "results"
Rows = list[dict[str, Any]]


def f1(wrong: np.ndarray, flagged: np.ndarray) -> float:
    return float(2 * (wrong & flagged).sum() / max(1, wrong.sum() + flagged.sum()))


def compare(p: np.ndarray, y: np.ndarray, wrong: np.ndarray) -> dict[str, Any]:
    """Average precision and F1 of neuvar, and of each of cleanlab's methods."""
    issues = judge_labels(p, y)
    scores = {name: get_label_quality_scores(y, p, method=name) for name in SCORES}
    for name in SCORES[:2]:
        adjusted = get_label_quality_scores(y, p, method=name, adjust_pred_probs=True)
        scores[f"{name}, adjusted"] = adjusted
    flags = {name: find_label_issues(y, p, filter_by=name, n_jobs=1) for name in FILTERS}
    return {
        "issues": issues,
        "wrong": wrong,
        "AP": average_precision_score(wrong, -issues.quality),
        "F1": f1(wrong, issues.flagged),
        "cleanlab AP": {k: average_precision_score(wrong, -s) for k, s in scores.items()},
        "cleanlab F1": {k: f1(wrong, np.asarray(mask)) for k, mask in flags.items()},
    }


def best(of: dict[str, float]) -> tuple[str, float]:
    return max(of.items(), key=lambda item: item[1])


def from_files(folder: Path) -> Rows:
    rows = []
    for path in sorted(folder.glob("*.npz")):
        data = np.load(path)
        p = data["probabilities"].astype(np.float64)
        p /= p.sum(1, keepdims=True)
        row = compare(p, data["labels"].astype(np.int64), data["wrong"].astype(bool))
        rows.append({"name": path.stem, **row})
        print(path.stem, f"AP {row['AP']:.4f} F1 {row['F1']:.4f}", flush=True)
    return rows


# Planted errors.


def planted(count: int, seed: int) -> Iterator[tuple[str, str, np.ndarray, np.ndarray, np.ndarray]]:
    """Name, kind of noise, probabilities, given and true labels."""
    for i in range(count):
        rng = np.random.default_rng(seed + i)
        name, x, true = draw_data(i, rng)
        kind, rate = NOISE[i % len(NOISE)]
        given = corrupt(kind, rate, x, true, rng)
        for model_name, model in models().items():
            folds = StratifiedKFold(5, shuffle=True, random_state=0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rare classes, unfinished optimization
                p = cross_val_predict(model, x, given, cv=folds, method="predict_proba")
            if p.shape[1] == true.max() + 1:
                yield f"{name}, {model_name}", kind, p, given, true


def draw_data(i: int, rng: np.random.Generator) -> tuple[str, np.ndarray, np.ndarray]:
    if i % 4 == 0:
        loaders = {"digits": load_digits, "cancer": load_breast_cancer, "wine": load_wine}
        name = list(loaders)[i // 4 % 3]
        x, y = loaders[name](return_X_y=True)
        return name, x, y
    classes, n = int(rng.integers(2, 16)), int(rng.integers(600, 4000))
    informative = int(rng.integers(4, 12))
    x, y = (
        make_classification(
            n_samples=n,
            n_features=informative + 8,
            n_informative=informative,
            n_redundant=2,
            n_classes=classes,
            n_clusters_per_class=1 + i % 2,
            weights=rng.dirichlet(np.full(classes, 5.0)) if i % 3 else None,
            class_sep=float(rng.uniform(0.8, 2.0)),
            flip_y=0.0,
            random_state=int(rng.integers(2**31)),
        )
        if 2**informative >= classes * (1 + i % 2)
        else draw_data(i, rng)[1:]
    )
    return f"gaussian {classes}", x, np.unique(y, return_inverse=True)[1]


def corrupt(kind: str, rate: float, x: np.ndarray, y: np.ndarray, rng: Any) -> np.ndarray:
    n, classes = len(y), int(y.max()) + 1
    hit = rng.random(n) < rate
    if kind == "symmetric":
        return np.where(hit, (y + rng.integers(1, classes, n)) % classes, y)
    if kind == "pair":
        return np.where(hit, (y + 1) % classes, y)
    if kind == "random matrix":
        rates = rng.dirichlet(np.full(classes, 0.3), classes) * rng.uniform(
            0, 2 * rate, (classes, 1)
        )
        np.fill_diagonal(rates, 0)
        np.fill_diagonal(rates, 1 - rates.sum(1))
        return (rates.cumsum(1)[y] < rng.random((n, 1))).sum(1).clip(max=classes - 1)
    # What a weak classifier of few examples confuses, the more often the less sure it is.
    few = rng.permutation(n)[: max(100, n // 5)]
    z = StandardScaler().fit_transform(x)
    q = np.zeros((n, classes))
    weak = GaussianNB().fit(z[few], y[few])
    q[:, weak.classes_] = weak.predict_proba(z).clip(1e-12) ** 0.25
    q[np.arange(n), y] = 0
    doubt = q.sum(1)
    hit = rng.random(n) < (doubt / doubt.mean() * rate).clip(max=0.8)
    other = (q.cumsum(1) / doubt[:, None] < rng.random((n, 1))).sum(1).clip(max=classes - 1)
    return np.where(hit, other, y)


def models() -> dict[str, Any]:
    return {
        "logistic regression": make_pipeline(
            StandardScaler(), LogisticRegression(max_iter=300, C=0.3)
        ),
        "trees": ExtraTreesClassifier(60, min_samples_leaf=3, random_state=0),
        "neighbours": make_pipeline(StandardScaler(), KNeighborsClassifier(15)),
        "network": make_pipeline(
            StandardScaler(), MLPClassifier((32,), max_iter=40, random_state=0)
        ),
    }


def from_planted(count: int, seed: int) -> Rows:
    rows = []
    for name, kind, predicted, given, true in planted(count, seed):
        p = predicted / predicted.sum(1, keepdims=True)
        row = compare(p, given, given != true)
        rows.append({"name": name, "kind": kind, "true": true, **row})
        print(name, kind, f"AP {row['AP']:.3f} F1 {row['F1']:.3f}", flush=True)
    return rows


# Tables.


NUMBER = re.compile(r"–|[\d.]+(\s%)?|[\d.]+ of \d+|[\d.]+ % \[[\d., ]+\]")


def table(head: list[str], rows: list[list[str]]) -> str:
    numeric = [all(map(NUMBER.fullmatch, column)) for column in zip(*rows, strict=True)]
    sides = ["---:" if i and right else "---" for i, right in enumerate(numeric)]
    lines = [head, sides, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of_files(rows: Rows) -> str:
    lines = []
    for row in rows:
        (score, ap), (method, flags) = best(row["cleanlab AP"]), best(row["cleanlab F1"])
        lines.append([
            row["name"], f"{row['AP']:.4f}", f"{ap:.4f} ({score})", f"{row['F1']:.4f}",
            f"{flags:.4f} ({method})", f"{100 * row['wrong'].mean():.1f} %",
            str(row["issues"].noise_rate),
        ])  # fmt: skip
    ours, theirs = ("neuvar", "cleanlab's best")
    head = ["file", f"AP, {ours}", f"AP, {theirs}", f"F1, {ours}", f"F1, {theirs}"]
    return table([*head, "wrong", "estimated [interval]"], lines)


def table_of_methods(rows: Rows) -> str:
    """Means over all sets, of each method alone."""
    lines = [["neuvar", mean(r["AP"] for r in rows), mean(r["F1"] for r in rows)]]
    scores, filters = rows[0]["cleanlab AP"], rows[0]["cleanlab F1"]
    lines += [[f"cleanlab, {k}", mean(r["cleanlab AP"][k] for r in rows), "–"] for k in scores]
    lines += [[f"cleanlab, {k}", "–", mean(r["cleanlab F1"][k] for r in rows)] for k in filters]
    for what in ("AP", "F1"):
        of = [best(r[f"cleanlab {what}"])[1] for r in rows]
        cells = [mean(of), "–"] if what == "AP" else ["–", mean(of)]
        lines.append([f"the best of cleanlab's on each set, by {what}", *cells])
    return table(["method", "average precision", "F1"], lines)


def mean(values: Any) -> str:
    return f"{np.mean(list(values)):.3f}"


def table_of_kinds(rows: Rows) -> str:
    kinds: dict[str, Rows] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    lines = []
    for kind, some in (kinds | {"all": rows}).items():
        cells = [mean(r["AP"] for r in some)]
        cells.append(mean(r["cleanlab AP"]["self_confidence"] for r in some))
        cells.append(mean(r["F1"] for r in some))
        cells.append(mean(r["cleanlab F1"]["prune_by_noise_rate"] for r in some))
        lines.append([kind, str(len(some)), *cells, *statements(some)])
    columns = ["planted errors", "sets", "AP", "AP, cleanlab", "F1", "F1, cleanlab"]
    columns += ["interval holds the truth", "replaced labels that are right", "sets made worse"]
    return table(columns, lines)


def statements(rows: Rows) -> list[str]:
    """How often intervals hold the truth, and what the default correction does."""
    held = [r["issues"].noise_rate.low <= r["wrong"].mean() <= r["issues"].noise_rate.high
            for r in rows]  # fmt: skip
    right, worse = [], 0
    for r in rows:
        issues, true = r["issues"], r["true"]
        sure = issues.sure()
        worse += bool((issues.cleaned != true).mean() > r["wrong"].mean())
        right += list(issues.suggested[sure] == true[sure])
    share = f"{np.mean(right):.2f} of {len(right):,}" if right else "–"
    return [f"{sum(held)} of {len(held)}", share, f"{worse} of {len(rows)}"]


def table_of_calibration(rows: Rows) -> str:
    """Flags by their stated probability; each set counts the same."""
    edges, lines = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95), []
    for low, high in pairwise(edges):
        stated, actual, weight = 0.0, 0.0, 0.0
        for r in rows:
            p = r["issues"].error_probability
            chosen = r["issues"].flagged & (p >= low) & (p <= high if high == 0.95 else p < high)
            stated += p[chosen].sum() / len(p)
            actual += r["wrong"][chosen].sum() / len(p)
            weight += chosen.sum() / len(p)
        lines.append([f"{low} to {high}", f"{stated / weight:.2f}", f"{actual / weight:.2f}"])
    return table(["error_probability", "stated", "really wrong"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=Path, help="folder of .npz files")
    parser.add_argument("--sets", type=int, default=64, help="data sets with planted errors")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.files:
        rows = from_files(options.files)
        write(options.results / "judgement_files.md", table_of_files(rows))
        print(table_of_calibration(rows))
    if options.sets:
        rows = from_planted(options.sets, options.seed)
        title = f"## Planted errors, seeds from {options.seed}"
        tables = table_of_methods(rows), table_of_kinds(rows), table_of_calibration(rows)
        write(options.results / "judgement.md", title, *tables)


def write(path: Path, *parts: str) -> None:
    text = "\n\n".join(parts) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
