"""``neuvar clean``: find wrong labels, show the worst, and write corrected ones."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from neuvar.cli.parsing import Commands, add_command, non_negative, positive
from neuvar.cli.run import PRECISIONS
from neuvar.engine import check_device

TRAINING: dict[str, Any] = {
    "b": "auto",
    "epochs": 30,
    "batch_size": 128,
    "lr": 0.1,
    "seed": 0,
    "device": "cpu",
    "precision": "float32",
}
"""How the network is trained unless told otherwise; without a training they mean nothing."""

TOP = 500


def add_clean(commands: Commands) -> None:
    """Add ``neuvar clean``."""
    parser = add_command(
        commands,
        "clean",
        "find wrong labels in a data set, show the worst, write corrected ones",
        """\
DATA is one of
  a folder      with a folder of images for each class
  FILE.npz      with an array called images, inputs, x, X or data, and labels, y or targets;
                others are named with --inputs and --labels
  FILE.csv      with a line of names; all columns but the one of labels are numbers. Left out are
                row numbers (a nameless first column, an index of pandas), the column label if
                --labels says that others are the labels, and what --drop names
  FILE.parquet  likewise
A network is trained once, with noise on its weights so that it does not learn labels by heart.
DIR gets index.html, to look at the worst and decide; issues.csv, all examples, the most suspicious
first; labels.csv, cleaned labels in the order of the data (and labels.npy for a .npz file);
summary.md and summary.json. Text in a CSV file that begins with =, +, - or @ and is no number has
an apostrophe before it, so that no spreadsheet carries it out.

examples:
  neuvar clean photos                              a folder of images, into out/clean
  neuvar clean mnist.npz --inputs x_train --labels y_train --out checked
  neuvar clean table.csv --labels species --drop id name --epochs 60
  neuvar clean table.csv --labels found/labels.csv --drop species
                                                   once more, with labels found before
  neuvar clean digits.npz --probabilities predicted.npy
                                                   nothing is trained
  neuvar clean digits.npz --decisions decisions.csv
                                                   labels of out/clean anew, with what was decided
                                                   on its page; nothing is trained
""",
    )
    _add_data(parser)
    _add_training(parser)
    parser.set_defaults(run=_clean)


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("data and results").add_argument
    add("data", type=Path, metavar="DATA", help="see below")
    add(
        "--labels",
        metavar="NAME|FILE",
        help="array or column of labels (default of a table: label), or a .npy, .npz or .csv file "
        "with them; for a folder, a .csv file with the columns file and label",
    )
    add("--inputs", metavar="NAME", help="array of inputs of a .npz file")
    add("--drop", nargs="+", action="extend", default=[], metavar="COLUMN",
        help="columns of a table that are no features, whatever they hold")  # fmt: skip
    add("--size", type=positive, metavar="PIXELS", help="of the images of a folder (default: "
        "their own if all are equal and at most 64, else 64)")  # fmt: skip
    add("--out", type=Path, default=Path("out/clean"), metavar="DIR",
        help="folder to write, whole or not at all (default: out/clean)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace an earlier result in DIR")
    add("--top", type=non_negative, metavar="N", help=f"examples on the page (default: {TOP})")
    add("--probabilities", type=Path, metavar="FILE",
        help="of classes, .npy, .npz or .csv, one row an example, one column a class, sorted as "
        "numbers or as text as the labels are: judge by these, do not train")  # fmt: skip
    add("--decisions", type=Path, metavar="FILE",
        help="from the page of an earlier result in DIR: write its labels with them")  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    said = {name: f"(default: {value})" for name, value in TRAINING.items()}
    add("--b", type=_scale, metavar="B", help=f"scale of the noise, or auto {said['b']}")
    add("--epochs", type=positive, metavar="N", help=f"times through all data {said['epochs']}")
    add("--batch-size", type=positive, metavar="N", help=f"of a step {said['batch_size']}")
    add("--lr", type=_rate, metavar="RATE", help=f"learning rate at the beginning {said['lr']}")
    add(
        "--seed", type=non_negative, metavar="N", help=f"of weights, order and noise {said['seed']}"
    )
    add("--device", help=f"cpu, cuda, cuda:N or mps {said['device']}")
    add("--precision", choices=PRECISIONS, help=f"mixed precision {said['precision']}")


def _scale(text: str) -> float | str:
    """A scale of noise: auto, or a number from 0."""
    if text == "auto" or _finite(text) >= 0:
        return text if text == "auto" else float(text)
    raise argparse.ArgumentTypeError(f"must be auto or a finite number >= 0, got {text!r}")


def _rate(text: str) -> float:
    if _finite(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(f"must be a finite number > 0, got {text!r}")


def _finite(text: str) -> float:
    """The number that a text spells; -1 if it spells none."""
    try:
        return float(text) if math.isfinite(float(text)) else -1.0
    except ValueError:
        return -1.0


def _clean(options: argparse.Namespace) -> int:
    _check_options(options)
    from neuvar.cli.label_issues import clean, decide  # imports torch

    return decide(options) if options.decisions else clean(options)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that would be accepted and ignored, and places that must not be written."""
    training = [name for name in TRAINING if getattr(options, name) is not None]
    if options.decisions:
        given = {name: getattr(options, name) for name in ("top", "probabilities", "overwrite")}
        others = [name for name, value in given.items() if value is not None and value is not False]
        _refuse([*others, *training], "--decisions")
    if options.probabilities:
        _refuse(training, "--probabilities")
    for name, value in TRAINING.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.device = check_device(options.device)
    data, out = options.data.resolve(), options.out.resolve()
    if options.data.is_dir() and (data == out or data in out.parents):
        raise ValueError(f"--out must not be inside of {options.data}, got {options.out}")


def _refuse(names: list[str], beside: str) -> None:
    if names:
        option = f"--{names[0].replace('_', '-')}"
        raise ValueError(f"{option} must not be given with {beside}, which has no use for it")
