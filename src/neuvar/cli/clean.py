"""``neuvar clean``: find wrong labels, show the worst, and write corrected ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from neuvar._validate import number
from neuvar.cli.command_line import non_negative, positive
from neuvar.cli.run import PRECISIONS
from neuvar.engine import check_device

TRAINING: dict[str, Any] = {
    "rho": 0.1,
    "b": None,
    "epochs": 30,
    "batch_size": 128,
    "lr": 0.1,
    "seed": 0,
    "device": "cpu",
    "precision": "float32",
}
"""Defaults of the training options."""

TOP = 500
DATA_OPTIONS = ("labels", "inputs", "drop", "size", "skip_unreadable")
"""Options of reading DATA."""
EXPORTS = ("cleanlab", "labelstudio")
"""Programs for which --export writes files."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``neuvar clean``."""
    parser.epilog = """\
DATA is one of
  a folder      with one subfolder of images for each class
  FILE.npz      with an array called images, inputs, x, X or data, and one called labels, y or
                targets; for other names use --inputs and --labels
  FILE.csv      with a header line; columns are numbers, dates, categories or text, and may have
                missing values. The labels are the column label, labels, class, target, category
                or y, or else the last column; the command prints which. These columns are not used:
                row numbers (an unnamed first column, a pandas index), short text that rarely
                repeats, those of --drop, and label if --labels names another column
  FILE.parquet  like FILE.csv

A network is trained once, with sharpness-aware minimization (see --rho) or weight noise (see --b),
so that it memorizes few wrong labels. For a table with text, a linear model is fitted instead (see
--model).

Files in DIR:
  index.html    a page to review the examples with the lowest label quality
  issues.csv    all examples, lowest label quality first
  labels.csv    the cleaned labels, in the order of the data; also labels.npy for a .npz file, and
                cleaned.csv with all columns for a .csv file
  probabilities.npz  the predicted probabilities of a training; --probabilities reads them
  summary.md    a summary; summary.json is the same for programs
In CSV files other than cleaned.csv, text that starts with =, +, - or @ and is not a number gets an
apostrophe in front, so that no spreadsheet runs it as a formula.

--cleaned-folder copies the images of a folder into subfolders named after their cleaned labels.
With --link it makes hard links, which take no space but share their content with the originals.
Where a hard link is impossible, such as on another disk, it copies. If a class already has a file
of the same name, 1.png from class cat becomes 1-from-cat.png, and the command prints it.

--export cleanlab writes cleanlab.csv, a table for cleanlab's CleanLearning.
--export labelstudio writes the flagged labels as tasks, label_studio.json, and the labeling
configuration of the project, label_studio.xml. Label Studio reads images as local files: start it
with LOCAL_FILES_SERVING_ENABLED=true and LOCAL_FILES_DOCUMENT_ROOT set to the folder that contains
DATA, and add DATA as a local source storage.

examples:
  neuvar clean photos                              a folder of images, results in out/clean
  neuvar clean mnist.npz --inputs x_train --labels y_train --out checked
  neuvar clean table.csv --labels species --drop id name --epochs 60
  neuvar clean table.csv --labels checked/labels.csv --drop species
                                                   clean labels again that were cleaned before
  neuvar clean photos --embeddings vectors.npy     train on embeddings from your own model, one
                                                   row per image, in the order of sorted files
  neuvar clean digits.npz --probabilities predicted.npy
                                                   use these probabilities, do not train
  neuvar clean photos --probabilities out/clean/probabilities.npz --overwrite --top 2000
                                                   show more of an earlier result
  neuvar clean digits.npz --observed observed.pt   use the probabilities of a LabelObserver in
                                                   your own training, do not train; without DATA,
                                                   the page shows indices and no pictures
  neuvar clean digits.npz --decisions decisions.csv
                                                   apply the decisions made on the page of
                                                   out/clean to its labels, do not train
  neuvar clean photos --decisions decisions.csv --cleaned-folder photos-clean
                                                   also copy the images into subfolders named
                                                   after the decided labels
  neuvar clean reviews.csv --export cleanlab labelstudio
                                                   also write files for these programs
"""
    add = parser.add_argument_group("data and results").add_argument
    add("data", type=Path, nargs="?", metavar="DATA",
        help="see below; may be left out with --observed")  # fmt: skip
    add("--labels", metavar="WHERE",
        help="array or column of labels, or a .npy, .npz or .csv file with them; for a folder, a "
        ".csv file with the columns file and label")  # fmt: skip
    add("--inputs", metavar="NAME", help="array of inputs in a .npz file")
    add("--embeddings", type=Path, metavar="FILE",
        help="embeddings from your own model, .npy or .npz, one row per example in the order of "
        "the data: train on them, show DATA on the page")  # fmt: skip
    add("--drop", nargs="+", action="extend", default=[], metavar="COLUMN",
        help="columns of a table to ignore")  # fmt: skip
    add("--size", type=positive, metavar="PIXELS", help="height and width of a folder's images "
        "(default: their own if all are equal and at most 64, else 64)")  # fmt: skip
    add("--skip-unreadable", action="store_true",
        help="skip images of a folder that cannot be read, and print which")  # fmt: skip
    add("--out", type=Path, default=Path("out/clean"), metavar="DIR",
        help="results folder (default: out/clean)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace an earlier result in DIR")
    add("--cleaned-folder", type=Path, metavar="FOLDER",
        help="also copy the images of a folder into subfolders named after their cleaned labels; "
        "FOLDER must be new or empty")  # fmt: skip
    add("--link", action="store_true", help="with --cleaned-folder: hard links instead of copies")
    add("--export", nargs="+", action="extend", default=[], choices=EXPORTS, metavar="PROGRAM",
        help="also write files for cleanlab, labelstudio or both")  # fmt: skip
    add("--top", type=non_negative, metavar="N",
        help=f"examples on the page, flagged ones first (default: {TOP})")  # fmt: skip
    add("--replace-at", type=_probability, metavar="P",
        help="replace a label if its suggestion is right with at least this probability; 1 "
        "replaces none (default: 0.9)")  # fmt: skip
    add("--probabilities", type=Path, metavar="FILE",
        help="predicted probabilities, .npy, .npz or .csv, one row per example and one column per "
        "class in sorted order: do not train")  # fmt: skip
    add("--observed", type=Path, metavar="FILE",
        help="file of LabelObserver.save(): judge the labels by your own training, do not "
        "train")  # fmt: skip
    add("--decisions", type=Path, metavar="FILE",
        help="decisions.csv from the page in DIR: apply them to its labels")  # fmt: skip
    add("--duplicates", action="store_true",
        help="also write duplicates.csv: examples that are equal or nearly equal, those with "
        "different labels first; the time grows with the square of their number")  # fmt: skip
    add = parser.add_argument_group("training").add_argument
    default = {name: f"(default: {value})" for name, value in TRAINING.items()}
    add("--model", choices=("network", "linear"),
        help="network: trained once, with perturbed weights; linear: logistic regression in five "
        "folds, without training options (default: linear for a table with a column of text, else "
        "network)")  # fmt: skip
    add("--rho", type=_rate, metavar="RHO",
        help=f"radius of sharpness-aware minimization, SAM {default['rho']}")  # fmt: skip
    add("--b", type=_scale, metavar="B",
        help="weight noise of this scale, or auto, instead of SAM")  # fmt: skip
    add("--epochs", type=positive, metavar="N",
        help=f"training length in gradients per example; SAM makes half as many passes "
        f"{default['epochs']}")  # fmt: skip
    add("--batch-size", type=positive, metavar="N",
        help=f"examples per batch {default['batch_size']}")  # fmt: skip
    add("--lr", type=_rate, metavar="RATE", help=f"initial learning rate {default['lr']}")
    add("--seed", type=non_negative, metavar="N", help=f"random seed {default['seed']}")
    add("--device", help=f"cpu, cuda, cuda:N or mps {default['device']}")
    add("--precision", choices=PRECISIONS, help=f"mixed precision {default['precision']}")
    add("--checkpoint", type=Path, metavar="FILE",
        help="save the training to FILE every minute; after Ctrl-C the same command resumes from "
        "the last save, and removes FILE at the end")  # fmt: skip
    parser.set_defaults(run=_clean)


def _scale(text: str) -> float | str:
    return text if text == "auto" else _number(text, "auto or a finite number >= 0", low=0)


def _rate(text: str) -> float:
    return _number(text, "a finite number > 0", above=0)


def _probability(text: str) -> float:
    return _number(text, "a number from 0 to 1", low=0, high=1)


def _number(text: str, wanted: str, **limits: float) -> float:
    try:
        return number("argument", float(text), **limits)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}") from None


def _refuse_unused(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect."""

    def refuse(where: str, *names: str) -> None:
        for name in names:
            value = getattr(options, name)
            if value is not None and value is not False and value != []:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} must not be given {where}, where it has no effect")

    training = ("model", *TRAINING, "checkpoint")
    if options.decisions:
        if options.export or options.top is not None:
            name = "--export" if options.export else "--top"
            file = options.out / "probabilities.npz"
            again = f"without training again, use --probabilities {file} --overwrite {name}"
            hint = again if file.exists() else "run the command again without --decisions"
            raise ValueError(f"{name} must not be given with --decisions; {hint}")
        scoring = ("replace_at", "probabilities", "embeddings", "duplicates")
        refuse("with --decisions", *scoring, "overwrite", *training)
    if options.probabilities:
        refuse("with --probabilities", *training, "embeddings")
    if options.observed:
        refuse("with --observed", *training, "probabilities", "embeddings")
    if options.data is None:
        refuse("without DATA", *DATA_OPTIONS, "cleaned_folder", "export", "duplicates")
    if options.cleaned_folder is None:
        refuse("without --cleaned-folder", "link")


def _clean(options: argparse.Namespace) -> int:
    if options.data is None and not options.observed:
        raise ValueError("DATA must be given, or --observed FILE")
    _refuse_unused(options)
    if options.data is not None and options.data.is_dir():
        data, out = options.data.resolve(), options.out.resolve()
        if data == out or data in out.parents:
            raise ValueError(f"--out must not be inside {options.data}, got {options.out}")
    given = {name: getattr(options, name) for name in TRAINING}
    options.training = TRAINING | {k: value for k, value in given.items() if value is not None}
    check_device(options.training["device"])
    from neuvar.cli.label_issues import apply_decisions, clean_labels  # imports torch

    return apply_decisions(options) if options.decisions else clean_labels(options)
