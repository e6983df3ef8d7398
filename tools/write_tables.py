"""Write the tables of README.md and docs/ from the files in results/.

Run it as ``python tools/write_tables.py``; ``make report`` does. A table NAME goes between
``<!-- table NAME -->`` and ``<!-- /table NAME -->``.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.run_spec import as_dict, from_dict

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from spread import spread, unbroken  # noqa: E402 - a neighbour of the benchmarks

RESULTS = ROOT / "results"
DOCUMENTS = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/results.md",
        "docs/cleaning.md",
        "docs/data.md",
        "docs/flatness.md",
        "docs/which-b.md",
        "docs/how-sure.md",
        "docs/huggingface.md",
        "docs/what-noise-is-good-for.md",
    )
)


def number(values: Iterable[float], digits: int, unit: str = "") -> str:
    return unbroken(spread(values, digits, unit=unit))


def percent(values: Iterable[float]) -> str:
    return unbroken(spread(values, 1, factor=100, unit=" %"))


def main() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text), encoding="utf-8")


def filled(text: str) -> str:
    """A document with its tables made anew."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        body = "\n".join(TABLES[name]())
        return f"<!-- table {name} -->\n\n{body}\n\n<!-- /table {name} -->"

    pattern = r"<!-- table (?P<name>\w+) -->.*?<!-- /table (?P=name) -->"
    return re.sub(pattern, table, text, flags=re.DOTALL)


def summary() -> list[str]:
    """Plain training, NVRM, and the best other method that costs as much."""
    import forgetting_methods
    import forgetting_table
    import moved_weights
    import uses
    import wrong_labels_tables

    moved, strong = lines("moved_weights.jsonl"), "noise of twice the size"
    noisy = moved_weights.chosen_noise(moved, strong)
    other = moved_weights.best_baseline(moved, strong)
    names = {"Adam": "Adam", noisy: noisy, other: other}
    values = {name: moved_weights.values(moved, name, strong) for name in names}

    arms = wrong_labels_tables.trials(lines("wrong_labels.jsonl"), "mnist-pair-40")
    equal = [arm for arm in arms if "NVRM" not in arm and uses.cost(arm) <= 1]
    auto = "NVRM-SGD, b = auto"

    def rivals(value: Callable[[Any], float]) -> list[tuple[str, dict[int, float]]]:
        values = {arm: wrong_labels_tables.by_seed(arms[arm], value) for arm in (*equal, auto)}
        best = uses.best({arm: values[arm] for arm in equal})
        return [("SGD", values["SGD"]), ("b = auto:", values[auto]), best]

    accuracies = rivals(lambda line: line["last"]["test"])
    precisions = rivals(lambda line: line["finding"]["margin of the mean"]["average_precision"])

    paper = trials("forgetting", "paper", "mean_accuracy", keep_optimizer=True)
    runs, others = lines("forgetting.jsonl"), {}
    for name, method in forgetting_methods.tried(forgetting_methods.METHODS, runs).items():
        if not method.without_noise:
            tasks = forgetting_table.by_seed(runs, forgetting_methods.chosen(method, runs), 5)
            others[name] = {seed: run["mean"] for seed, run in tasks.items()}
    kept, of_seeds = uses.best({name: values for name, values in others.items() if values})
    best = list(of_seeds.values())
    return [
        "| task | measure | plain | with NVRM | best other method of the same cost | n |",
        "| --- | --- | --- | --- | --- | ---: |",
        compared(
            "Strong noise on the weights: 2 × their root mean square, MNIST", "test accuracy",
            *((name, values[name]) for name in names), show=percent,
        ),
        compared(
            "40 % wrong labels: MNIST, pair flips", "test accuracy, last epoch",
            *accuracies, show=percent,
        ),
        compared(
            "Finding these labels in one training, ranked by the margin of the mean probability",
            "average precision",
            *precisions, show=partial(number, digits=3),
        ),
        "| Forgetting: five permuted MNIST tasks, paper's settings | mean accuracy of all tasks "
        f"| Adam {percent(paper['adam', 0.0])} "
        f"| b = 0.03: {percent(paper['nvrm-adam', 0.03])} "
        f"| {kept}, falling learning rate {percent(best)} "
        f"(another benchmark, bf16, n = {len(best)}) "
        f"| {len(paper['adam', 0.0])} |",
    ]  # fmt: skip


def compared(
    task: str,
    measure: str,
    *methods: tuple[str, dict[int, float]],
    show: Callable[[list[float]], str],
) -> str:
    """A row of methods, over the seeds that all of them have."""
    seeds = sorted(set.intersection(*(set(values) for _, values in methods)))
    cells = [f"{name} {show([values[seed] for seed in seeds])}" for name, values in methods]
    return f"| {task} | {measure} | {' | '.join(cells)} | {len(seeds)} |"


def trials(experiment: str, scale: str, metric: str, **fields: Any) -> dict[Any, list[float]]:
    """The last values of a metric by optimizer and b, over the trials of planned settings."""
    planned = {
        setting(as_json(run))
        for run in EXPERIMENTS[experiment].runs(scale)  # type: ignore[arg-type]
        if as_json(run).items() >= fields.items()
    }
    values: dict[Any, dict[int, float]] = {}
    for line in lines(f"{scale}.jsonl"):
        run = as_json(from_dict(line["run"]))
        if line["status"] == "finished" and setting(run) in planned:
            group = values.setdefault((run["optimizer"], run["b"]), {})
            group[run["seed"]] = line["last"][metric]
    return {key: list(group.values()) for key, group in values.items()}


def lines(name: str) -> list[dict[str, Any]]:
    text = (RESULTS / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def as_json(run: Any) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(as_dict(run)))
    return record


def setting(run: dict[str, Any]) -> str:
    """What identifies a setting: all of a run but its seeds."""
    return json.dumps({k: v for k, v in sorted(run.items()) if k not in ("seed", "label_seed")})


def flatness() -> list[str]:
    rows = [
        "| optimizer | n | largest b | test accuracy, clean weights | with noise of scale 0.1 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, values in flatness_by_optimizer().items():
        title = "NVRM-Adam, b = 0.05" if name == "NVRM-Adam" else name
        cells = number(values["b"], 4), percent(values["clean"]), percent(values["noisy"])
        rows.append(f"| {title} | {len(values['b'])} | {' | '.join(cells)} |")
    return rows


def flatness_by_optimizer() -> dict[str, dict[str, list[float]]]:
    values: dict[str, dict[str, list[float]]] = {}
    for run in json.loads((RESULTS / "flatness.json").read_text())["runs"]:
        group = values.setdefault(run["optimizer"], {"b": [], "clean": [], "noisy": []})
        noisy = next(point for point in run["curve"] if point["b"] == 0.1)
        group["b"].append(run["largest_b"]["b"])
        group["clean"].append(noisy["clean_accuracy"])
        group["noisy"].append(noisy["accuracy"]["mean"])
    return values


def huggingface() -> list[str]:
    columns = {
        "test_accuracy": "test accuracy",
        "memorized": "wrong labels memorized",
        "auroc": "AUROC of wrong labels",
        "last_b": "b at the end",
    }
    rows = [f"| b | n | {' | '.join(columns.values())} |", "| --- |" + " ---: |" * 5]
    trials: dict[str, list[dict[str, float]]] = {}
    for line in lines("huggingface.jsonl"):
        trials.setdefault(str(line["b"]), []).append(line)
    for b, group in trials.items():
        cells = [number([line[metric] for line in group], 3) for metric in columns]
        rows.append(f"| {b} | {len(group)} | {' | '.join(cells)} |")
    return rows


COLUMNS = {
    "fused": "torch, fused",
    "NVRM": "NVRM",
    "NVRM replay": "NVRM, replay",
    "NVRM parameters": "NVRM, from parameters",
    "naive": "naive",
    "IVON": "IVON",
    "SAM": "SAM",
}


def cost() -> list[str]:
    networks = json.loads((RESULTS / "optimizers.json").read_text())["networks"]
    rows = [f"| network | {' | '.join(COLUMNS.values())} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for network in networks.values():
        cells = []
        for name in COLUMNS:
            measured = network["contenders"][name]
            low, median, high = (measured["ratio"][key] for key in ("low", "median", "high"))
            steady, peak = (round(measured[key]) for key in ("steady", "peak"))
            time = f"{median:.2f}<br>({low:.2f}–{high:.2f})"
            cells.append(f"{time}<br>{steady:+d} / {peak:+d}".replace("+0", "0"))
        rows.append(f"| {network['title']}, batch {network['batch']} | {' | '.join(cells)} |")
    return rows


def largest_b() -> list[str]:
    """The largest b of each network, and the lowest and the highest of their intervals."""
    rows = [
        "| | n | largest b | intervals of the networks | test accuracy |",
        "| --- | ---: | ---: | --- | ---: |",
    ]
    intervals: dict[str, list[list[float]]] = {}
    for run in json.loads((RESULTS / "flatness.json").read_text())["runs"]:
        intervals.setdefault(run["optimizer"], []).append(run["largest_b"]["interval"])
    for name, values in flatness_by_optimizer().items():
        title = "NVRM-Adam, b = 0.05" if name == "NVRM-Adam" else name
        ends = (
            f"[{low:.3f}, {high:.3f}]"
            for low, high in sorted(intervals[name])[:: len(values["b"]) - 1]
        )
        cells = number(values["b"], 4), f"from {' to '.join(ends)}", percent(values["clean"])
        rows.append(f"| {title} | {len(values['b'])} | {' | '.join(cells)} |")
    return rows


def variability_cost() -> list[str]:
    return cost_ratios("variability", {"ours": "neuvar", "loop": "your own loop"})


def prediction_cost() -> list[str]:
    loops = {"one by one": "one draw at a time", "loop": "a loop over noisy copies"}
    return cost_ratios("predicting", {"ours": "`neuvar.predict`", **loops})


def cost_ratios(benchmark: str, columns: dict[str, str]) -> list[str]:
    """Times relative to plain passes, with quartiles."""
    rows = [f"| network | {' | '.join(columns.values())} |", "| --- |" + " ---: |" * len(columns)]
    for title, case in json.loads((RESULTS / f"{benchmark}.json").read_text())["cases"].items():
        ratios = (case["ratios"][name] for name in columns)
        cells = (f"{r['median']:.2f} ({r['low']:.2f}–{r['high']:.2f})" for r in ratios)
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return rows


def penalties() -> list[str]:
    """Penalties against forgetting, with a new optimizer for each task."""
    runs = [run for run in lines("continual.jsonl") if run["role"] == "test" and not run["b"]]
    methods: dict[tuple[str, float], dict[int, dict[str, Any]]] = {}
    for run in runs:
        methods.setdefault((run["method"], run["strength"]), {})[run["seed"]] = run
    plain = methods["none", 0.0]
    order = sorted(methods, key=lambda key: (key[0] != "none", key[0]))
    rows = [
        "| method | n | first task | mean of five tasks | gain |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for method, strength in order:
        trials_ = methods[method, strength]
        title = "Adam" if method == "none" else f"{method.upper()}, strength {strength:g}"
        cells = [number((run[key] for run in trials_.values()), 3) for key in ("first", "mean")]
        gains = [run["mean"] - plain[seed]["mean"] for seed, run in trials_.items()]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        gain = f"{statistics.fmean(gains):+.3f} ± {error:.3f}"
        gain = "" if method == "none" else unbroken(gain)
        rows.append(f"| {title} | {len(trials_)} | {' | '.join(cells)} | {gain} |")
    return rows


def adam_forgets() -> list[str]:
    """Adam by pixels, and by whether its state is kept over tasks."""
    kept = [sum(r["accuracy"]) / 5 for r in lines("samplers.jsonl") if r["optimizer"] == "adam"]
    runs = [run for run in lines("continual.jsonl") if run["role"] == "test"]
    new = [run["mean"] for run in runs if run["method"] == "none" and not run["b"]]
    paper = [
        trials("forgetting", "paper", "mean_accuracy", keep_optimizer=keep)["adam", 0.0]
        for keep in (True, False)
    ]
    head = (
        "| Adam, mean of five tasks | one optimizer for all tasks | a new optimizer for each task |"
    )
    rows = [head, "| --- | ---: | ---: |"]
    for title, pair in (
        ("pixels in [0, 1]", (kept, new)),
        ("normalized pixels ([experiment 4a](reproduction.md))", paper),
    ):
        cells = (number(values, 3, unit=f" (n = {len(values)})") for values in pair)
        rows.append(f"| {title} | {' | '.join(cells)} |")
    return rows


def auto() -> list[str]:
    import auto

    return auto.table(RESULTS)


def cleaning_judgements() -> list[str]:
    import cleaning

    rows = cleaning.judgements(cleaning.collected(RESULTS / "cleaning.jsonl"))
    return [row for row in rows if "by\N{NO-BREAK SPACE}margin" not in row]


def cleaning_trainings() -> list[str]:
    import cleaning

    return cleaning.trainings(cleaning.collected(RESULTS / "cleaning.jsonl"))


def wrong_labels() -> list[str]:
    import wrong_labels_tables

    return wrong_labels_tables.accuracy_tables(RESULTS)


def wrong_label_differences() -> list[str]:
    import wrong_labels_tables

    return wrong_labels_tables.pair_tables(RESULTS)


def finding_wrong_labels() -> list[str]:
    import wrong_labels_tables

    return wrong_labels_tables.finding_tables(RESULTS)


def forgetting() -> list[str]:
    import forgetting_table

    return forgetting_table.report(lines("forgetting.jsonl"))


def flatness_methods() -> list[str]:
    import flatness

    return flatness.table(RESULTS)


def moved_weights() -> list[str]:
    import moved_weights

    return moved_weights.table(lines("moved_weights.jsonl"))


def quantized() -> list[str]:
    import quantized

    return quantized.table(lines("quantized.jsonl"))


def uncertainty() -> list[str]:
    import uncertainty
    import uncertainty_tables

    text = uncertainty_tables.tables(lines("uncertainty.jsonl"), uncertainty.ROWS)
    return text.strip().splitlines()


def uncertainty_compared() -> list[str]:
    import uncertainty
    import uncertainty_tables

    return uncertainty_tables.compared(lines("uncertainty.jsonl"), uncertainty.ROWS)


def uses() -> list[str]:
    import uses

    return uses.table(RESULTS)


TABLES: dict[str, Callable[[], list[str]]] = {
    "summary": summary,
    "flatness": flatness,
    "flatness_methods": flatness_methods,
    "largest_b": largest_b,
    "variability_cost": variability_cost,
    "prediction_cost": prediction_cost,
    "penalties": penalties,
    "adam_forgets": adam_forgets,
    "auto": auto,
    "cleaning_judgements": cleaning_judgements,
    "cleaning_trainings": cleaning_trainings,
    "cost": cost,
    "huggingface": huggingface,
    "wrong_labels": wrong_labels,
    "finding_wrong_labels": finding_wrong_labels,
    "wrong_label_differences": wrong_label_differences,
    "forgetting": forgetting,
    "moved_weights": moved_weights,
    "quantized": quantized,
    "uncertainty": uncertainty,
    "uncertainty_compared": uncertainty_compared,
    "uses": uses,
}

if __name__ == "__main__":
    main()
