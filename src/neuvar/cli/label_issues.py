"""Run ``neuvar clean``: find wrong labels, print a summary and write the results folder."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neuvar.cleaning.cleaned_folder import check_cleaned_folder, write_cleaned_folder
from neuvar.cleaning.duplicates import find_duplicates
from neuvar.cleaning.examples import Examples
from neuvar.cleaning.find import find_label_issues
from neuvar.cleaning.image_folder import require_pillow
from neuvar.cleaning.observer import LabelObserver
from neuvar.cleaning.page import is_images
from neuvar.cleaning.posterior import Array
from neuvar.cleaning.readers import (
    OBSERVED,
    Source,
    history_of,
    read_embeddings,
    read_observed,
    read_probabilities,
    read_source,
    with_classes,
)
from neuvar.cleaning.results import (
    check_exports,
    check_folder,
    decided_labels,
    write_cleaning,
    write_decided,
)
from neuvar.cleaning.score import REPLACE_AT, LabelIssues, compare_with_chance, judge_labels
from neuvar.cleaning.summary import Cleaning, frequent_pairs
from neuvar.cleaning.training import network_for
from neuvar.cli.clean import DATA_OPTIONS, TOP, TRAINING
from neuvar.cli.command_line import aligned
from neuvar.cli.progress import training_progress
from neuvar.pages import printable

LONG_TRAINING = 60.0
"""Seconds after which an interrupted training without --checkpoint mentions it."""
STANDARDIZED_AT_ONCE = 1_000_000
"""Numbers converted to float64 at once."""


def clean_labels(options: argparse.Namespace) -> int:
    """Find wrong labels, write the results and print a summary."""
    check_folder(options.out, overwrite=options.overwrite)
    began = time.perf_counter()
    source = _read(options)
    check_exports(source, options.export)
    if is_images(source.examples.inputs):
        require_pillow()  # for the page; fails before the training
    for note in source.notes:
        print(printable(note), flush=True)
    left_out = printable(", ".join(source.left_out))
    if left_out:
        print(f"left out: {left_out}", flush=True)
    if options.probabilities:
        source, issues, settings = _score_probabilities(source, options.probabilities)
    elif options.observed:
        source, issues, settings = _score_observed(source, options)
    else:
        text = any(source.from_text) and not options.embeddings
        model = options.model or ("linear" if text else "network")
        issues, settings = (_fit_linear if model == "linear" else _train)(source, options)
    history = settings.pop("history", None)
    duplicates = None
    if options.duplicates:
        duplicates = find_duplicates(_model_inputs(source.examples, options))
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
        exports=tuple(options.export),
        duplicates=duplicates,
        history=history,
    )
    top = TOP if options.top is None else options.top
    write_cleaning(cleaning, options.out, top=top, overwrite=options.overwrite)
    if options.checkpoint is not None:
        options.checkpoint.unlink(missing_ok=True)  # not needed any more
    _print_results(cleaning, options)
    _write_cleaned_folder(source, cleaning.labels, options)
    return 0


def _print_results(cleaning: Cleaning, options: argparse.Namespace) -> None:
    """Print a summary and the paths of the files."""
    print(cleaning)
    pairs = [
        (printable(a), printable(b), f"{n:,}") for a, b, n in frequent_pairs(cleaning.issues, 5)
    ]
    if pairs:
        rows = [("given", "suggested", "flagged"), *pairs]
        print(*("  " + line for line in aligned(rows, right=[2])), sep="\n")
    print(f"page to review the worst: {options.out / 'index.html'}")
    print(f"cleaned labels: {_labels_location(cleaning.source, options.out)}")
    if cleaning.duplicates is not None:
        print(f"{cleaning.duplicates}: {options.out / 'duplicates.csv'}")
    if "cleanlab" in options.export:
        print(f"for cleanlab: {options.out / 'cleanlab.csv'}")
    if "labelstudio" in options.export:
        config = options.out / "label_studio.xml"
        print(f"for Label Studio: {options.out / 'label_studio.json'}, configuration {config}")


def apply_decisions(options: argparse.Namespace) -> int:
    """Apply the decisions that were made on the page of an earlier result."""
    source = _read(options)
    decided = write_decided(source, options.out, options.decisions)
    count, where = len(decided), _labels_location(source, options.out)
    print(f"{count} decision{'s' * (count != 1)} applied; cleaned labels: {where}")
    _write_cleaned_folder(source, decided_labels(source, decided), options)
    return 0


def _write_cleaned_folder(source: Source, labels: Array, options: argparse.Namespace) -> None:
    if options.cleaned_folder is None:
        return
    print(f"writing {len(labels):,} images to {options.cleaned_folder}", flush=True)
    written = write_cleaned_folder(
        options.cleaned_folder, options.data, source.examples, labels, link=options.link
    )
    print(printable(f"cleaned folder: {written}"))


def _read(options: argparse.Namespace) -> Source:
    """Check the options of the cleaned folder, then read the data."""
    if options.cleaned_folder is not None:
        check_cleaned_folder(options.cleaned_folder, options.data, options.out)
    if options.data is None:
        return read_observed(options.observed)
    return read_source(options.data, **{name: getattr(options, name) for name in DATA_OPTIONS})


def _data_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    """The command-line arguments that read the same data."""
    pairs = [(name, getattr(options, name)) for name in ("inputs", "labels", "size")]
    pairs += [("drop", name) for name in options.drop]
    words = ["--observed", str(options.observed)] if options.data is None else [str(options.data)]
    if options.skip_unreadable:
        words.append("--skip-unreadable")
    for name, value in pairs:
        if value and str(value).startswith("-"):
            words.append(f"--{name}={value}")
        elif value:
            words += [f"--{name}", str(value)]
    return tuple(words)


def _score_probabilities(source: Source, file: Path) -> tuple[Source, LabelIssues, dict[str, Any]]:
    p = read_probabilities(file, source.examples.names)
    source = with_classes(source, p.shape[1])
    e = source.examples
    _print_size(e)
    print(f"order of classes: {_name_list(e.names)}", flush=True)
    history = history_of(file)
    if history:
        issues = judge_labels(p, e.labels, names=e.names, history=True)
    else:
        issues = find_label_issues(p, e.labels, names=e.names)
    own, by_chance, errors = compare_with_chance(issues.probabilities, issues.labels)
    if errors < -2:
        raise ValueError(
            f"--probabilities gives the labels {own:.3g} on average, less than labels in "
            f"random order ({by_chance:.3g}): its columns must be the classes in this "
            f"order: {_name_list(e.names)}"
        )
    return source, issues, {"probabilities": str(file), "history": history}


def _score_observed(
    source: Source, options: argparse.Namespace
) -> tuple[Source, LabelIssues, dict[str, Any]]:
    """Judge labels by a LabelObserver's probabilities; without data, only the seen examples."""
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
        unseen = observer.examples - len(issues)
    else:
        issues = replace(observer.label_issues(e.labels), names=e.names)
        unseen = len(issues.unseen)
    if unseen:
        print(f"never seen in training, not judged: {unseen:,} examples", flush=True)
        settings["never_seen"] = unseen
    return source, issues, settings


def _train(source: Source, options: argparse.Namespace) -> tuple[LabelIssues, dict[str, Any]]:
    """Train a network once, and judge the labels by its probabilities."""
    training: dict[str, Any] = options.training
    unused = "rho" if options.b is not None else "b"
    _print_size(source.examples)
    examples = _model_inputs(source.examples, options)
    settings = _embeddings_setting(examples, options)
    network = network_for(examples, seed=training["seed"])
    weights = sum(p.numel() for p in network.parameters())
    began = time.perf_counter()
    try:
        with training_progress() as progress:
            issues = find_label_issues(
                network, examples, checkpoint=options.checkpoint, progress=progress, **training
            )
    except KeyboardInterrupt:
        if (file := options.checkpoint) is not None:
            saved = "the same command resumes from it" if file.exists() else "nothing saved yet"
            print(f"{file} is written every minute: {saved}", flush=True)
        elif time.perf_counter() - began >= LONG_TRAINING:
            print("nothing is saved; --checkpoint FILE would save it every minute", flush=True)
        raise
    shown = {name: value for name, value in training.items() if name != unused}
    settings |= {"network": f"{type(network).__name__}, {weights:,} weights", **shown}
    settings["history"] = True
    if issues.b is not None and issues.b != options.b:
        settings["b_at_the_end"] = float(f"{issues.b:.4g}")
    return issues, settings


def _fit_linear(source: Source, options: argparse.Namespace) -> tuple[LabelIssues, dict[str, Any]]:
    """Predict each label with a logistic regression fitted to the other folds."""
    for name in (*TRAINING, "checkpoint"):
        if name != "seed" and getattr(options, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} has no effect on a linear model, which is the default "
                "for text; leave it out, or give --model network"
            )
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    _print_size(source.examples)
    examples = _model_inputs(source.examples, options)
    settings = _embeddings_setting(examples, options)
    if source.from_text and not options.embeddings:
        # Features of text are not standardized: their leading components matter most.
        from_text = torch.tensor(source.from_text)
        mixed = torch.where(from_text, source.examples.inputs, examples.inputs)
        examples = replace(examples, inputs=mixed)
    print("logistic regression, fitted in five folds", flush=True)
    model = LogisticRegression(max_iter=1000)
    seed = options.training["seed"]
    issues = find_label_issues(model, examples, seed=seed)
    settings |= {"linear": "logistic regression, five folds", "seed": seed, "history": False}
    return issues, settings


def _embeddings_setting(examples: Examples, options: argparse.Namespace) -> dict[str, Any]:
    if not options.embeddings:
        return {}
    count = examples.inputs.shape[1]
    print(f"training on embeddings of {count:,} numbers: {options.embeddings}", flush=True)
    return {"embeddings": str(options.embeddings)}


def _name_list(names: Sequence[str]) -> str:
    shown = printable(", ".join(names[:8]))
    return f"{shown}, … ({len(names):,} in all)" if len(names) > 8 else shown


def _print_size(examples: Examples) -> None:
    print(f"{len(examples):,} examples of {len(examples.names):,} classes", flush=True)


def _model_inputs(examples: Examples, options: argparse.Namespace) -> Examples:
    """The examples that a model is trained on: inputs or embeddings, standardized."""
    if options.embeddings:
        vectors = read_embeddings(options.embeddings, len(examples))
        examples = replace(examples, inputs=vectors)
    return standardize(examples)


def standardize(examples: Examples) -> Examples:
    """Scale each feature to mean 0 and standard deviation 1; uint8 images are not changed.

    Float images share one mean and one standard deviation.
    """
    inputs = examples.inputs
    if not inputs.is_floating_point():
        return examples
    dims = 0 if inputs.ndim == 2 else tuple(range(inputs.ndim))
    count = len(inputs) if inputs.ndim == 2 else inputs.numel()
    # In float64, but not all at once.
    parts = inputs.split(max(1, STANDARDIZED_AT_ONCE // max(1, inputs[0].numel())))
    mean = sum(part.double().sum(dims, keepdim=True) for part in parts) / count
    squares = sum((part.double() - mean).square().sum(dims, keepdim=True) for part in parts)
    spread = (squares / count).sqrt()
    # A constant feature becomes 0, even if its mean has a rounding error.
    spread = spread.where(spread > 1e-9 * mean.abs(), torch.inf)
    scaled = torch.empty_like(inputs)
    for part, out in zip(parts, scaled.split(len(parts[0])), strict=True):
        out.copy_((part.double() - mean) / spread)
    return replace(examples, inputs=scaled)


def _labels_location(source: Source, out: Path) -> str:
    if source.kind == "npz":
        return f'numpy.load("{out / "labels.npy"}")'
    if source.label_column is not None:
        return f"{out / 'cleaned.csv'}, with the columns of {source.name}"
    by = {"folder": "by file", OBSERVED: "by index"}.get(source.kind, "in the order of the rows")
    return f"column label of {out / 'labels.csv'}, {by}"
