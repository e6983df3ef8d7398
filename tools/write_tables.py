"""Write the tables of README.md and docs/results.md from the files in results/.

Run it as ``python tools/write_tables.py``; ``make report`` does. A table NAME goes between
``<!-- table NAME -->`` and ``<!-- /table NAME -->``.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from neuvar.experiments import EXPERIMENTS
from neuvar.experiments.run_spec import as_dict, from_dict

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
RESULTS = ROOT / "results"
NO_BREAK = "\N{NO-BREAK SPACE}"
DOCUMENTS = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/results.md",
        "docs/huggingface.md",
        "docs/what-noise-is-good-for.md",
    )
)


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
    mnist = {"data": "mnist", "noise_rate": 0.4}
    forgetting = trials("forgetting", "paper", "mean_accuracy", keep_optimizer=True)
    wrong = {
        data: trials("pair-flips", "cpu", "test_accuracy", data=data, noise_rate=0.4)
        for data in ("mnist", "cifar10")
    }
    flat = flatness_by_optimizer()
    cleaning = lines("cleaning.jsonl")
    ranking = {
        way: [
            line["last"][way]["auroc"]
            for line in cleaning
            if way in line["last"]
            and line["run"].items() >= {**mnist, "label_noise": "pair"}.items()
        ]
        for way in ("cleanlab", "ours")
    }
    return [
        "| task | measure | without noise | with NVRM | n |",
        "| --- | --- | ---: | ---: | ---: |",
        "| Forgetting: five permuted MNIST tasks, paper's settings | mean accuracy of all tasks "
        f"| Adam {percent(forgetting['adam', 0.0])} "
        f"| b = 0.03: {percent(forgetting['nvrm-adam', 0.03])} "
        f"| {count(forgetting['adam', 0.0])} |",
        "| Wrong labels: MNIST, 40 % pair flips | test accuracy, last epoch "
        f"| SGD {percent(wrong['mnist']['sgd', 0.0])} "
        f"| b = 0.07: {percent(wrong['mnist']['nvrm-sgd', 0.07])} "
        f"| {count(wrong['mnist']['sgd', 0.0])} |",
        "| Wrong labels: CIFAR-10, 40 % pair flips | test accuracy, last epoch "
        f"| SGD {percent(wrong['cifar10']['sgd', 0.0])} "
        f"| b = 0.02: {percent(wrong['cifar10']['nvrm-sgd', 0.02])} "
        f"| {count(wrong['cifar10']['sgd', 0.0])} |",
        "| Finding the wrong labels of MNIST, 40 % pair flips | area under the ROC curve "
        f"| cleanlab, 5 trainings: {plain(ranking['cleanlab'], 3)} "
        f"| 1 training: {plain(ranking['ours'], 3)} | {count(ranking['ours'])} |",
        "| Robustness: weight noise of scale 0.1, MNIST excerpt | test accuracy "
        f"| Adam {percent(flat['Adam']['noisy'])} "
        f"| b = 0.05: {percent(flat['NVRM-Adam']['noisy'])} "
        f"| {count(flat['Adam']['noisy'])} |",
    ]


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
        cells = plain(values["b"], 4), percent(values["clean"]), percent(values["noisy"])
        rows.append(f"| {title} | {count(values['b'])} | {' | '.join(cells)} |")
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
        cells = [plain([line[metric] for line in group], 3) for metric in columns]
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
    rows = [f"| network | {' | '.join(COLUMNS.values())} |", "| --- " * (len(COLUMNS) + 1) + "|"]
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


def percent(values: Iterable[float]) -> str:
    listed = list(values)
    # The mean first, as in the tables of ``neuvar report``: the last digit may depend on it.
    mean, deviation = 100 * statistics.fmean(listed), 100 * statistics.stdev(listed)
    return f"{mean:.1f} ± {deviation:.1f} %".replace(" ", NO_BREAK)


def plain(values: Iterable[float], digits: int) -> str:
    listed = list(values)
    mean, deviation = statistics.fmean(listed), statistics.stdev(listed)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}".replace(" ", NO_BREAK)


def count(values: Iterable[float]) -> int:
    return len(list(values))


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


def moved_weights() -> list[str]:
    import moved_weights

    return moved_weights.table(lines("moved_weights.jsonl"))


def uses() -> list[str]:
    import uses

    return uses.table(RESULTS)


TABLES: dict[str, Callable[[], list[str]]] = {
    "summary": summary,
    "flatness": flatness,
    "cost": cost,
    "huggingface": huggingface,
    "wrong_labels": wrong_labels,
    "finding_wrong_labels": finding_wrong_labels,
    "wrong_label_differences": wrong_label_differences,
    "forgetting": forgetting,
    "moved_weights": moved_weights,
    "uses": uses,
}

if __name__ == "__main__":
    main()
