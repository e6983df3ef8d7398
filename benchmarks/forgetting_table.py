"""The tables of the forgetting benchmark, in Markdown, from the lines of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from forgetting_methods import (
    METHODS,
    SEEDS,
    Method,
    chosen,
    held_out_accuracy,
    setting_of,
    tried,
)
from forgetting_training import Setting
from spread import difference, spread

Lines = Sequence[dict[str, Any]]


def report(
    lines: Lines, planned: Mapping[int, int] = SEEDS, methods: Mapping[str, Method] = METHODS
) -> list[str]:
    """All tables: every method, what noise adds, and longer streams."""
    methods = tried(methods, lines)
    parts = [methods_table(lines, 5, planned[5], methods)]
    parts.append(["What noise adds, paired by seed:"])
    parts.append(noise_table(lines, 5, planned[5], methods))
    for tasks in planned:
        if tasks > 5 and any(line["tasks"] == tasks for line in lines):
            parts.append([f"{tasks} tasks, with the settings that were chosen for five:"])
            parts.append(methods_table(lines, tasks, planned[tasks], methods))
    return "\n\n".join("\n".join(part) for part in parts).splitlines()


def methods_table(
    lines: Lines, tasks: int, planned: int, methods: Mapping[str, Method]
) -> list[str]:
    """A row for each method that has runs; differences are paired by seed."""
    baseline = strongest_simple(lines, methods)
    rows = [
        f"| {tasks} tasks | chosen setting | n | first task | last task | mean of all tasks "
        f"| difference to {baseline.name}, 95 % interval |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    reference = by_seed(lines, chosen(baseline, lines), tasks)
    for method in methods.values():
        setting = chosen(method, lines)
        runs = by_seed(lines, setting, tasks)
        if not runs:
            continue
        columns = [
            percent(run["final"][0] for run in runs.values()),
            percent(run["final"][-1] for run in runs.values()),
            percent(run["mean"] for run in runs.values()),
            "" if method is baseline else gain(runs, reference),
        ]
        n = count(len(runs), planned)
        rows.append(f"| {method.name} | {describe(setting)} | {n} | {' | '.join(columns)} |")
    return rows


def noise_table(lines: Lines, tasks: int, planned: int, methods: Mapping[str, Method]) -> list[str]:
    """What noise adds to each method, paired by seed."""
    rows = [
        "| method | b | n | without noise | with NVRM | difference, 95 % interval |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method in methods.values():
        if method.without_noise not in methods:
            continue
        plain = by_seed(lines, chosen(methods[method.without_noise], lines), tasks)
        setting = chosen(method, lines)
        noisy = by_seed(lines, setting, tasks)
        both = sorted(plain.keys() & noisy.keys())
        if not both:
            continue
        means = [percent(runs[seed]["mean"] for seed in both) for runs in (plain, noisy)]
        cells = [f"{setting.b:g}", count(len(both), planned), *means, gain(noisy, plain)]
        rows.append(f"| {method.without_noise} | {' | '.join(cells)} |")
    return rows


def choice_table(lines: Lines, methods: Mapping[str, Method] = METHODS) -> list[str]:
    """All candidates with their accuracy on held-out images."""
    rows = ["| method | candidate | mean of 5 tasks, held-out images |", "| --- | --- | ---: |"]
    for method in tried(methods, lines).values():
        best = chosen(method, lines)
        for setting in method.candidates:
            accuracy = f"{100 * held_out_accuracy(setting, method, lines):.2f}"
            mark = " (chosen)" if setting == best else ""
            rows.append(f"| {method.name} | {describe(setting)}{mark} | {accuracy} |")
    return rows


def strongest_simple(lines: Lines, methods: Mapping[str, Method]) -> Method:
    """The simple baseline with the highest accuracy on held-out images, at its chosen setting."""
    simple = [method for method in methods.values() if method.simple]
    return max(simple, key=lambda m: held_out_accuracy(chosen(m, lines), m, lines))


def by_seed(lines: Lines, setting: Setting, tasks: int) -> dict[int, dict[str, Any]]:
    return {
        line["seed"]: line
        for line in lines
        if (line["role"], line["tasks"]) == ("test", tasks) and setting_of(line) == setting
    }


def gain(runs: dict[int, dict[str, Any]], reference: dict[int, dict[str, Any]]) -> str:
    """Difference in points over the seeds that both have."""
    both = sorted(runs.keys() & reference.keys())
    return difference(
        [runs[seed]["mean"] - reference[seed]["mean"] for seed in both], 2, factor=100
    )


def count(done: int, planned: int) -> str:
    return str(done) if done >= planned else f"{done} of {planned}"


percent = partial(spread, digits=2, factor=100)


def describe(setting: Setting) -> str:
    """A setting in words; what is as usual is left out."""
    words = [f"lr {setting.lr:g}"]
    if setting.within == "linear":
        words.append("decays to 0 in each task")
    if setting.task_decay != 1:
        words.append(f"× {setting.task_decay:g} per task")
    words.append(f"batch {setting.batch}")
    if setting.dropout:
        words.append(f"dropout {setting.dropout:g}")
    if setting.strength:
        words.append(f"λ {setting.strength:g}")
    if setting.b:
        words.append(f"b {setting.b:g}")
    return ", ".join(words)
