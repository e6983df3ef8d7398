"""Find the wrong labels that ``neuvar clean`` is asked for, print them and write its folder."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from neuvar.cleaning.files import Source, read_probabilities, read_source, with_classes
from neuvar.cleaning.finding import find_label_issues
from neuvar.cleaning.inputs import Examples
from neuvar.cleaning.issues import LabelIssues
from neuvar.cleaning.judging import known_of_labels
from neuvar.cleaning.networks import network_for
from neuvar.cleaning.summary import Cleaning, findings, printable, worst_pairs
from neuvar.cleaning.writing import check_folder, write_cleaning, write_decided
from neuvar.cli.clean import TOP, TRAINING
from neuvar.cli.columns import aligned
from neuvar.cli.progress import training_progress


def clean(options: argparse.Namespace) -> int:
    """Find wrong labels, write what was found and print a summary."""
    check_folder(options.out, overwrite=options.overwrite)
    began = time.perf_counter()
    source = _source(options)
    left_out = printable(", ".join(source.left_out))
    if left_out:
        print(f"left out: {left_out}", flush=True)
    source, issues, settings = _judged(source, options)
    if left_out:
        settings["left_out"] = left_out
    cleaning = Cleaning(
        source=source,
        issues=issues,
        settings=settings,
        command=shlex.join(["neuvar", *options.words]),
        again=_again(options),
        seconds=time.perf_counter() - began,
    )
    top = TOP if options.top is None else options.top
    write_cleaning(cleaning, options.out, top=top, overwrite=options.overwrite)
    _tell(cleaning, options.out)
    return 0


def _source(options: argparse.Namespace) -> Source:
    return read_source(
        options.data,
        labels=options.labels,
        inputs=options.inputs,
        drop=options.drop,
        size=options.size,
    )


def _again(options: argparse.Namespace) -> tuple[str, ...]:
    """Words that read the same data once more."""
    given = [(name, getattr(options, name)) for name in ("inputs", "labels", "size")]
    said = [(name, value) for name, value in given if value]
    said += [("drop", name) for name in options.drop]
    words = [word for name, value in said for word in _words(f"--{name}", str(value))]
    return (str(options.data), *words)


def _words(option: str, value: str) -> list[str]:
    """An option and its value, as one word where two would be taken for two options."""
    return [f"{option}={value}"] if value.startswith("-") else [option, value]


def _judged(
    source: Source, options: argparse.Namespace
) -> tuple[Source, LabelIssues, dict[str, Any]]:
    """What was found, and how."""
    if options.probabilities:
        given = read_probabilities(options.probabilities, source.examples.names)
        source = with_classes(source, given.shape[1])
        e = _told(source.examples)
        print(f"order of classes: {_order(e.names)}", flush=True)
        issues = find_label_issues(given, e.labels, names=e.names)
        _refuse_other_order(issues)
        return source, issues, {"probabilities": str(options.probabilities)}
    how = {name: getattr(options, name) for name in TRAINING}
    examples = standardised(_told(source.examples))
    network = network_for(examples, seed=options.seed)
    weights = sum(p.numel() for p in network.parameters())
    with training_progress() as progress:
        issues = find_label_issues(network, examples, progress=progress, **how)
    said = {"network": f"{type(network).__name__}, {weights:,} weights", **how}
    if issues.b is not None and issues.b != options.b:
        said["b_at_the_end"] = float(f"{issues.b:.4g}")
    return source, issues, said


def _order(names: Sequence[str], most: int = 8) -> str:
    """The first few classes, and how many there are."""
    shown = printable(", ".join(names[:most]))
    return f"{shown}, … ({len(names):,} in all)" if len(names) > most else shown


def _refuse_other_order(issues: LabelIssues) -> None:
    """Probabilities that fit labels in random order better are those of other classes."""
    own, by_chance, errors = known_of_labels(issues.probabilities, issues.labels)
    if errors < -2:
        raise ValueError(
            f"--probabilities gives the labels {own:.3g} on average, less than labels in "
            f"random order ({by_chance:.3g}): its columns must be the classes in this "
            f"order: {_order(issues.names)}"
        )


def _told(examples: Examples) -> Examples:
    """The examples, after a word on how many they are."""
    print(f"{len(examples):,} examples of {len(examples.names):,} classes", flush=True)
    return examples


def standardised(examples: Examples) -> Examples:
    """Features with mean 0 and standard deviation 1, each on its own; bytes stay as they are.

    Inputs with a shape, such as images in floating point, have one mean and one deviation.
    """
    inputs = examples.inputs
    if not inputs.is_floating_point():
        return examples
    exact, over = inputs.double(), 0 if inputs.ndim == 2 else tuple(range(inputs.ndim))
    mean, spread = exact.mean(over, keepdim=True), exact.std(over, keepdim=True, correction=0)
    # A feature that is always the same says nothing, and is 0.
    scaled = (exact - mean) / spread.where(spread > 0, spread.new_ones(()))
    return replace(examples, inputs=scaled.to(inputs.dtype))


def _tell(cleaning: Cleaning, out: Path) -> None:
    """What was found, where it is, and what to do with it."""
    print(findings(cleaning))
    pairs = [(printable(a), printable(b), f"{n:,}") for a, b, n in worst_pairs(cleaning.issues, 5)]
    if pairs:
        rows = [("given", "suggested", "flagged"), *pairs]
        print(*("  " + line for line in aligned(rows, right=[2])), sep="\n")
    print(f"written: {out / 'index.html'}, where the worst can be accepted or rejected")
    print(f"cleaned labels: {_use(cleaning.source, out)}")


def _use(source: Source, out: Path) -> str:
    if source.kind == "npz":
        return f'numpy.load("{out / "labels.npy"}")'
    by = "by file" if source.kind == "folder" else "in the order of the rows"
    return f"column label of {out / 'labels.csv'}, {by}"


def decide(options: argparse.Namespace) -> int:
    """Apply the decisions that were made on the page of an earlier result."""
    source = _source(options)
    count = write_decided(source, options.out, options.decisions)
    print(
        f"{count} decision{'s' * (count != 1)} applied; cleaned labels: {_use(source, options.out)}"
    )
    return 0
