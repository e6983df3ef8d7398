"""Run ``neuvar clean``: find wrong labels, print a summary and write the results folder."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from neuvar.cleaning.examples import Examples
from neuvar.cleaning.find import find_label_issues, network_for
from neuvar.cleaning.image_folder import require_pillow
from neuvar.cleaning.observer import LabelObserver
from neuvar.cleaning.page import is_images
from neuvar.cleaning.readers import (
    OBSERVED,
    Source,
    read_embeddings,
    read_observed,
    read_probabilities,
    read_source,
    with_classes,
)
from neuvar.cleaning.results import (
    Cleaning,
    check_folder,
    frequent_pairs,
    write_cleaning,
    write_decided,
)
from neuvar.cleaning.score import REPLACE_AT, LabelIssues, compare_with_chance
from neuvar.cli.clean import DATA_OPTIONS, TOP, TRAINING
from neuvar.cli.command_line import aligned
from neuvar.cli.progress import training_progress
from neuvar.pages import printable


def clean(options: argparse.Namespace) -> int:
    """Find wrong labels, write the results and print a summary."""
    check_folder(options.out, overwrite=options.overwrite)
    began = time.perf_counter()
    source = _read(options)
    if is_images(source.examples.inputs):
        require_pillow()  # the page needs it, after the training
    for note in source.notes:
        print(printable(note), flush=True)
    left_out = printable(", ".join(source.left_out))
    if left_out:
        print(f"left out: {left_out}", flush=True)
    if options.probabilities:
        source, issues, settings = _score_given(source, options.probabilities)
    elif options.observed:
        source, issues, settings = _score_observed(source, options)
    else:
        issues, settings = _train(source.examples, options)
    if left_out:
        settings["left_out"] = left_out
    if source.notes:
        settings["columns"] = "; ".join(source.notes)
    cleaning = Cleaning(
        source=source,
        issues=issues,
        settings=settings,
        command=shlex.join(["neuvar", *options.words]),
        data_arguments=_data_arguments(options),
        seconds=time.perf_counter() - began,
        replace_at=REPLACE_AT if options.replace_at is None else options.replace_at,
    )
    top = TOP if options.top is None else options.top
    write_cleaning(cleaning, options.out, top=top, overwrite=options.overwrite)
    print(cleaning)
    pairs = [(printable(a), printable(b), f"{n:,}") for a, b, n in frequent_pairs(issues, 5)]
    if pairs:
        rows = [("given", "suggested", "flagged"), *pairs]
        print(*("  " + line for line in aligned(rows, right=[2])), sep="\n")
    print(f"page to review the worst: {options.out / 'index.html'}")
    print(f"cleaned labels: {_where(source, options.out)}")
    return 0


def apply_decisions(options: argparse.Namespace) -> int:
    """Apply the decisions that were made on the page of an earlier result."""
    source = _read(options)
    count = write_decided(source, options.out, options.decisions)
    where = _where(source, options.out)
    print(f"{count} decision{'s' * (count != 1)} applied; cleaned labels: {where}")
    return 0


def _read(options: argparse.Namespace) -> Source:
    if options.data is None:
        return read_observed(options.observed)
    return read_source(options.data, **{name: getattr(options, name) for name in DATA_OPTIONS})


def _data_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """The arguments that read the same data again."""
    given = [(name, getattr(options, name)) for name in ("inputs", "labels", "size")]
    given += [("drop", name) for name in options.drop]
    words = ["--observed", str(options.observed)] if options.data is None else [str(options.data)]
    if options.skip_unreadable:
        words.append("--skip-unreadable")
    for name, value in given:
        if value and str(value).startswith("-"):
            words.append(f"--{name}={value}")
        elif value:
            words += [f"--{name}", str(value)]
    return tuple(words)


def _score_given(source: Source, file: Path) -> tuple[Source, LabelIssues, dict[str, Any]]:
    p = read_probabilities(file, source.examples.names)
    source = with_classes(source, p.shape[1])
    e = source.examples
    _print_size(e)
    print(f"order of classes: {_order(e.names)}", flush=True)
    issues = find_label_issues(p, e.labels, names=e.names)
    own, by_chance, errors = compare_with_chance(issues.probabilities, issues.labels)
    if errors < -2:
        raise ValueError(
            f"--probabilities gives the labels {own:.3g} on average, less than labels in "
            f"random order ({by_chance:.3g}): its columns must be the classes in this "
            f"order: {_order(e.names)}"
        )
    return source, issues, {"probabilities": str(file)}


def _score_observed(
    source: Source, options: argparse.Namespace
) -> tuple[Source, LabelIssues, dict[str, Any]]:
    """Judge labels by what an observer has seen; without data, those of the seen examples."""
    observer = LabelObserver.load(options.observed)
    settings: dict[str, Any] = {"observed": str(options.observed)}
    if options.data is not None:
        source = with_classes(source, observer.classes, "--observed")
        if len(source.examples) != observer.examples:
            raise ValueError(
                f"--observed must be about {source.name}, which has {len(source.examples):,} "
                f"examples, not {observer.examples:,}"
            )
    e = source.examples
    _print_size(e)
    if options.data is None:
        issues, _ = observer.seen_issues()
        never = observer.examples - len(issues)
    else:
        issues = replace(observer.label_issues(e.labels), names=e.names)
        never = len(issues.unseen)
    if never:
        print(f"never seen in training, not judged: {never:,} examples", flush=True)
        settings["never_seen"] = never
    return source, issues, settings


def _train(examples: Examples, options: argparse.Namespace) -> tuple[LabelIssues, dict[str, Any]]:
    training = {name: getattr(options, name) for name in TRAINING}
    _print_size(examples)
    own: dict[str, Any] = {}
    if options.embeddings:
        vectors = read_embeddings(options.embeddings, len(examples))
        print(f"trained on {vectors.shape[1]:,} numbers each, {options.embeddings}", flush=True)
        examples, own = replace(examples, inputs=vectors), {"embeddings": str(options.embeddings)}
    examples = standardize(examples)
    network = network_for(examples, seed=options.seed)
    weights = sum(p.numel() for p in network.parameters())
    with training_progress() as progress:
        issues = find_label_issues(network, examples, progress=progress, **training)
    settings = own | {"network": f"{type(network).__name__}, {weights:,} weights", **training}
    if issues.b is not None and issues.b != options.b:
        settings["b_at_the_end"] = float(f"{issues.b:.4g}")
    return issues, settings


def _order(names: Sequence[str]) -> str:
    shown = printable(", ".join(names[:8]))
    return f"{shown}, … ({len(names):,} in all)" if len(names) > 8 else shown


def _print_size(examples: Examples) -> None:
    print(f"{len(examples):,} examples of {len(examples.names):,} classes", flush=True)


def standardize(examples: Examples) -> Examples:
    """Each feature with mean 0 and standard deviation 1; uint8 images are not changed.

    Images in floating point have one mean and one deviation.
    """
    inputs = examples.inputs
    if not inputs.is_floating_point():
        return examples
    exact, dims = inputs.double(), 0 if inputs.ndim == 2 else tuple(range(inputs.ndim))
    mean, spread = exact.mean(dims, keepdim=True), exact.std(dims, keepdim=True, correction=0)
    # A constant feature becomes 0.
    scaled = (exact - mean) / spread.where(spread > 0, spread.new_ones(()))
    return replace(examples, inputs=scaled.to(inputs.dtype))


def _where(source: Source, out: Path) -> str:
    if source.kind == "npz":
        return f'numpy.load("{out / "labels.npy"}")'
    if source.label_column is not None:
        return f"{out / 'cleaned.csv'}, with the columns of {source.name}"
    by = {"folder": "by file", OBSERVED: "by index"}.get(source.kind, "in the order of the rows")
    return f"column label of {out / 'labels.csv'}, {by}"
