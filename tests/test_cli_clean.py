"""``neuvar clean`` from the command line to the files it leaves."""

import csv
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from neuvar.cleaning import Examples, find_label_issues, judge_labels
from neuvar.cli import label_issues, main, progress
from neuvar.cli.clean import TRAINING
from neuvar.cli.label_issues import standardize
from neuvar.data import mnist_excerpt
from neuvar.labels import corrupt
from tests.conftest import PATIENCE

FILES = {"index.html", "issues.csv", "labels.csv", "labels.npy", "summary.json", "summary.md"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def neuvar(capsys, *arguments):
    """Exit code and what was said on both streams."""
    try:
        code = main([str(word) for word in arguments])
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def digits():
    """A few images of which two have a wrong label, and probabilities that know it."""
    rng = np.random.default_rng(0)
    truth = np.arange(30) % 3
    given = truth.copy()
    given[[4, 11]] = 0, 0
    np.savez("digits.npz", images=rng.integers(0, 256, (30, 6, 6), dtype=np.uint8), labels=given)
    p = np.full((30, 3), 0.1)
    p[np.arange(30), truth] = 0.8
    p[4] = 0.05, 0.9, 0.05
    np.save("p.npy", p)
    return given, truth


class Finder:
    """Stands in for the training, and remembers what it was asked."""

    def __init__(self):
        self.calls, self.during = [], lambda: None

    def __call__(self, model, data, *, progress=None, **options):
        self.calls.append((model, data, options))
        for share in np.linspace(0, 1, 41):
            progress(float(share))
        self.during()
        p = np.full((len(data), len(data.names)), 0.05)
        p[np.arange(len(data)), np.arange(len(data)) % len(data.names)] = 1
        found = judge_labels(p / p.sum(1, keepdims=True), data.labels, names=data.names)
        return replace(found, b=0.031415926 if options["b"] == "auto" else options["b"])


@pytest.fixture
def finder(monkeypatch):
    made = Finder()
    monkeypatch.setattr(label_issues, "find_label_issues", made)
    return made


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_probabilities_to_files(capsys, digits):
    given, truth = digits
    words = ["clean", "digits.npz", "--probabilities", "p.npy", "--replace-at", "0.4"]
    code, out, err = neuvar(capsys, *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "30 examples of 3 classes"
    assert lines[1] == "order of classes: 0, 1, 2"
    assert lines[2].startswith("2 of 30 labels are flagged (6.7 %); about ")
    assert [line.split() for line in lines[3:6]] == [
        ["given", "suggested", "flagged"],
        ["0", "1", "1"],
        ["0", "2", "1"],
    ]
    assert lines[6:] == [
        "page to review the worst: out/clean/index.html",
        'cleaned labels: numpy.load("out/clean/labels.npy")',
    ]
    folder = Path("out/clean")
    assert {path.name for path in folder.iterdir()} == FILES
    assert (np.load(folder / "labels.npy") == truth).all()
    issues = rows_of(folder / "issues.csv")
    assert [row["index"] for row in issues[:2]] == ["4", "11"]
    assert [row["flagged"] for row in issues].count("true") == 2
    assert [int(row["label"]) for row in rows_of(folder / "labels.csv")] == truth.tolist()
    said = json.loads((folder / "summary.json").read_text())
    assert said["command"] == f"neuvar {' '.join(words)}"
    assert (said["replaced"], said["replace_at"]) == (2, 0.4)
    assert said["settings"] == {"probabilities": "p.npy"}
    assert said["seed"] is None
    assert (given[[4, 11]] == 0).all()


def test_embeddings_are_trained_on_and_the_data_are_shown(capsys, digits, finder):
    vectors = np.arange(150.0).reshape(30, 5)
    np.save("vectors.npy", vectors)
    code, out, err = neuvar(capsys, "clean", "digits.npz", "--embeddings", "vectors.npy")
    assert (code, err) == (0, "")
    assert "training on embeddings of 5 numbers: vectors.npy" in out.splitlines()
    ((model, examples, _),) = finder.calls
    assert model(examples.inputs).shape == (30, 3)
    scaled = (vectors - vectors.mean(0)) / vectors.std(0)
    np.testing.assert_allclose(examples.inputs.numpy(), scaled, atol=1e-6)
    said = json.loads(Path("out/clean/summary.json").read_text())
    assert said["settings"]["embeddings"] == "vectors.npy"
    assert '"pictures":["data:image/png' in Path("out/clean/index.html").read_text()
    for wrong, words in (
        (vectors[:29], r"numbers of shape \(30, size\), one row for each example, got shape \(29"),
        (vectors.astype(str), "got shape .* and type <U"),
        (np.where(vectors == 7, np.nan, vectors), "inputs must be finite"),
    ):
        np.save("vectors.npy", wrong)
        words_given = ("clean", "digits.npz", "--embeddings", "vectors.npy", "--overwrite")
        code, _, err = neuvar(capsys, *words_given)
        assert code == 2
        assert re.search(words, err)
    code, _, err = neuvar(capsys, "clean", "digits.npz", "--embeddings", "none.npy", "--overwrite")
    assert "there is no none.npy; --embeddings must be a .npy or .npz file" in err
    words = ("--embeddings", "vectors.npy", "--probabilities", "p.npy", "--overwrite")
    code, _, err = neuvar(capsys, "clean", "digits.npz", *words)
    assert "--embeddings must not be given with --probabilities" in err


@pytest.mark.parametrize("model", ["", "--model network --epochs 20"])
def test_a_table_of_every_kind_of_column(capsys, model):
    """Trained for real, from the file to the page."""
    rng = np.random.default_rng(0)
    true = np.arange(120) % 2
    words = np.array([["sun", "rain", "wind", "cloud"], ["goal", "match", "team", "coach"]])
    wrong = np.isin(np.arange(120), [5, 30, 77])
    rows = ["when,place,points,note,topic"]
    for i, k in enumerate(true):
        note = " ".join(rng.choice(words[k], 5))
        points = "" if i == 9 else f"{rng.normal() + 3 * k:.3f}"
        topic = ("weather", "sport")[k ^ wrong[i]]
        rows.append(
            f"2024-05-{1 + i % 28:02},{'north' if i % 3 else 'south'},{points},{note},{topic}"
        )
    Path("news.csv").write_text("\n".join(rows) + "\n")
    code, out, err = neuvar(capsys, "clean", "news.csv", *model.split())
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "labels: column 'topic', guessed; name another with --labels"
    assert lines[1] == (
        "1 column of numbers ('points': 1 missing, filled with the median), 1 column of dates, 1 "
        "column of categories ('place': 2 values), 1 column of text ('note': n-grams of letters "
        "and words)"
    )
    worst = [int(row["index"]) for row in rows_of("out/clean/issues.csv")[:3]]
    assert sorted(worst) == [5, 30, 77]
    assert ("logistic regression, fitted in five folds" in lines) == (not model)
    page = Path("out/clean/index.html").read_text()
    assert ("a linear model that had not seen it" in page) == (not model)
    assert '"columns":["when","place","points","note"]' in page
    Path("decisions.csv").write_text("index,given,label\n5,weather,sport\n")
    code, out, err = neuvar(capsys, "clean", "news.csv", "--decisions", "decisions.csv")
    assert (code, err) == (0, "")
    labels = [row["label"] for row in rows_of("out/clean/labels.csv")]
    given = [row.rsplit(",", 1)[1] for row in rows[1:]]
    assert [i for i in range(120) if labels[i] != given[i]] == [5]
    assert "cleaned labels: out/clean/cleaned.csv, with the columns of news.csv" in out
    cleaned = Path("out/clean/cleaned.csv").read_text().splitlines()
    assert cleaned[6] == rows[6].replace("weather", "sport")
    assert cleaned[:6] + cleaned[7:] == rows[:6] + rows[7:]


@pytest.fixture
def quick(monkeypatch):
    """A clock for progress that does not depend on how busy the machine is."""
    clock = itertools.count(step=1e-3)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))


def test_options_reach_the_training(capsys, digits, finder, quick):
    words = "--b 0.02 --epochs 7 --batch-size 16 --lr 0.05 --seed 5 --precision bf16 --top 1"
    code, out, _ = neuvar(capsys, "clean", "digits.npz", *words.split(), "--out", "a/b")
    assert code == 0
    (model, data, options), *more = finder.calls
    assert more == []
    assert isinstance(model, torch.nn.Module)
    assert len(data) == 30
    wanted = {"b": 0.02, "epochs": 7, "batch_size": 16, "lr": 0.05, "seed": 5}
    others = {"rho": TRAINING["rho"], "device": "cpu", "precision": "bf16", "checkpoint": None}
    assert options == wanted | others
    said = json.loads(Path("a/b/summary.json").read_text())
    assert said["settings"] | wanted == said["settings"]
    assert not {"b_at_the_end", "rho"} & set(said["settings"])
    assert said["seed"] == 5
    assert "weights" in said["settings"]["network"]
    assert [line for line in out.splitlines() if line.startswith("trained")] == [
        f"trained to {10 * k}%, less than 1 s left" for k in range(1, 10)
    ]
    assert '"index":[4]' in Path("a/b/index.html").read_text()


def test_defaults_are_those_of_the_library(capsys, digits, finder):
    assert neuvar(capsys, "clean", "digits.npz")[0] == 0
    assert finder.calls[0][2] == TRAINING | {"checkpoint": None}
    there = inspect.signature(find_label_issues).parameters
    assert {name: there[name].default for name in TRAINING} == TRAINING
    said = json.loads(Path("out/clean/summary.json").read_text())
    assert said["settings"]["rho"] == 0.1
    assert "b" not in said["settings"]


def test_b_at_the_end_is_reported(capsys, digits, finder):
    assert neuvar(capsys, "clean", "digits.npz", "--b", "auto")[0] == 0
    said = json.loads(Path("out/clean/summary.json").read_text())
    assert said["settings"]["b"] == "auto"
    assert said["settings"]["b_at_the_end"] == 0.03142
    assert "| b at the end | 0.03142 |" in Path("out/clean/summary.md").read_text()


def test_a_bar_for_a_person(capsys, digits, finder, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    code, out, _ = neuvar(capsys, "clean", "digits.npz")
    assert code == 0
    assert "trained to" not in out
    assert "training" in out
    for name in ("rich", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, _ = neuvar(capsys, "clean", "digits.npz", "--overwrite")
    assert code == 0
    assert "trained to 50%" in out


def test_features_are_standardised_for_the_training_only(capsys, finder):
    rows = "1,50000,x\n3,70000,y\n2,60000,x\n2,60000,y\n" * 5 + "1,50000,y\n3,70000,y\n"
    Path("t.csv").write_text(f"a,b,label\n{rows}")
    assert neuvar(capsys, "clean", "t.csv", "--top", "1")[0] == 0
    inputs = finder.calls[0][1].inputs
    assert inputs.mean(0).tolist() == pytest.approx([0, 0], abs=1e-6)
    assert inputs.std(0, correction=0).tolist() == pytest.approx([1, 1])
    assert '"numbers":[[1.0,50000.0]]' in Path("out/clean/index.html").read_text()


def test_columns_that_are_left_out_are_told(capsys, finder):
    rows = "".join(f"{i},{i % 3},z{i},{i % 2},{i % 2}\n" for i in range(12))
    Path("t.csv").write_text(f",a,-b,label,kind\n{rows}")
    words = ["clean", "t.csv", "--labels", "kind", "--drop=-b"]
    code, out, err = neuvar(capsys, *words)
    assert (code, err) == (0, "")
    told = "column '' (row numbers), column 'label' (other labels)"
    assert out.splitlines()[:2] == [f"left out: {told}", "12 examples of 2 classes"]
    assert finder.calls[0][1].inputs.shape == (12, 1)
    said = json.loads(Path("out/clean/summary.json").read_text())
    assert said["settings"]["left_out"] == told
    again = "neuvar clean t.csv --labels kind --drop=-b --decisions decisions.csv --out out/clean"
    assert again in Path("out/clean/index.html").read_text()
    Path("decisions.csv").write_text("index,given,label\n3,1,0\n")
    assert neuvar(capsys, *again.split()[1:])[0] == 0
    assert rows_of("out/clean/labels.csv")[3]["label"] == "0"
    code, out, _ = neuvar(capsys, *words[:2], "--labels", "out/clean/labels.csv", "--out", "two",
                          "--drop", "kind", "-b")  # fmt: skip
    assert code == 2
    code, out, _ = neuvar(capsys, *words[:2], "--labels", "out/clean/labels.csv", "--out", "two",
                          "--drop", "kind", "--drop=-b")  # fmt: skip
    assert code == 0
    assert out.startswith(f"left out: {told}\n")
    assert finder.calls[1][1].inputs.shape == (12, 1)


def test_inputs_by_name(capsys, finder):
    rng = np.random.default_rng(0)
    np.savez("k.npz", x_train=rng.integers(0, 256, (9, 6, 6), np.uint8), y_train=np.arange(9) % 3)
    words = ["clean", "k.npz", "--inputs", "x_train", "--labels", "y_train"]
    assert neuvar(capsys, *words)[0] == 0
    assert finder.calls[0][1].inputs.shape == (9, 6, 6)
    again = f"neuvar {' '.join(words)} --decisions decisions.csv --out out/clean"
    assert again in Path("out/clean/index.html").read_text()
    Path("decisions.csv").write_text("index,given,label\n3,0,1\n")
    assert neuvar(capsys, *again.split()[1:])[0] == 0
    code, _, err = neuvar(capsys, "clean", "k.npz", "--overwrite")
    assert code == 2
    assert "it has x_train, y_train; name them with --inputs NAME and --labels NAME" in err


@pytest.mark.parametrize("shape", [(3, 32, 32), (32, 32, 3), (40, 40), (1, 28, 28), (28, 28)])
def test_the_network_depends_on_the_shape_alone(shape):
    from neuvar.cleaning import network_for, read_examples
    from neuvar.cleaning.training import make_batches

    found = []
    for kind in (np.uint8, np.float32, np.int64):
        examples = read_examples((np.zeros((4, *shape), kind), [0, 1, 0, 1]))
        network = network_for(examples, seed=0)
        batch = next(iter(make_batches(examples, 4, device="cpu", shuffle=False).epoch(0)))[0]
        assert network(batch).shape == (4, 2)
        found.append([tuple(p.shape) for p in network.parameters()])
    assert found[0] == found[1] == found[2]


def test_standardize():
    labels, names = np.array([0, 1]), ("a", "b")
    flat = Examples(torch.tensor([[1.0, 7.0], [3.0, 7.0]]), labels, names)
    assert standardize(flat).inputs.tolist() == [[-1, 0], [1, 0]]
    image = Examples(torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]]), labels, names)
    assert standardize(image).inputs.tolist() == [[[-1, 1]], [[1, -1]]]
    far = Examples(torch.tensor([[1e9], [1e9 + 128]]), labels, names)
    assert standardize(far).inputs.tolist() == [[-1], [1]]
    bytes_ = Examples(torch.zeros(2, 3, 3, dtype=torch.uint8), labels, names)
    assert standardize(bytes_) is bytes_


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--b -1", "argument --b: must be auto or a finite number >= 0, got '-1'"),
        ("--b nan", "argument --b: must be auto or a finite number >= 0, got 'nan'"),
        ("--b much", "argument --b: must be auto or a finite number >= 0, got 'much'"),
        ("--lr 0", "argument --lr: must be a finite number > 0, got '0'"),
        ("--epochs 0", "argument --epochs: must be an integer >= 1, got '0'"),
        ("--batch-size x", "argument --batch-size: must be an integer >= 1, got 'x'"),
        ("--top -1", "argument --top: "),
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--device tpu", "device must be cpu, cuda, cuda:N or mps, got 'tpu'"),
        ("--size 8", "--size is for folders of images, got digits.npz"),
        ("--labels z", "got 'z'"),
        ("--inputs z", "--inputs must be an array of digits.npz, which has images, labels, got"),
        ("--drop z", "--drop is for tables, got digits.npz"),
        ("--probabilities q.npy", "--probabilities must be a .npy, .npz or .csv file, got 'q.npy'"),
        ("--probabilities p.npy --epochs 3", "--epochs must not be given with --probabilities"),
        ("--probabilities p.npy --seed 0", "--seed must not be given with --probabilities"),
        ("--decisions d.csv --overwrite", "--overwrite must not be given with --decisions"),
        ("--decisions d.csv --top 0", "--top must not be given with --decisions"),
        ("--decisions d.csv --embeddings e.npy", "--embeddings must not be given with --decisions"),
        ("--decisions d.csv --duplicates", "--duplicates must not be given with --decisions"),
        ("--probabilities p.npy --checkpoint c.pt", "--checkpoint must not be given with --prob"),
        ("--decisions d.csv --batch-size 3", "--batch-size must not be given with --decisions"),
        ("--decisions d.csv", "there is no d.csv; --decisions must be a .csv file from the page"),
        (
            "--decisions digits.npz",
            "out/clean has no readable result of neuvar clean; give its folder with --out",
        ),
        ("--out digits.npz", "--out must be a folder, digits.npz is a file"),
        ("--epoch 3", "unrecognized arguments: --epoch 3; see neuvar clean --help"),
    ],
)
def test_bad_options_get_one_sentence(capsys, digits, finder, words, sentence):
    code, out, err = neuvar(capsys, "clean", "digits.npz", *words.split())
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert finder.calls == []
    assert not Path("out").exists()


def test_bad_probabilities(capsys, digits):
    np.save("short.npy", np.full((29, 3), 1 / 3))
    np.save("wide.npy", np.full((30, 2), 1 / 2))
    np.save("sum.npy", np.full((30, 3), 1 / 2))
    for name, sentence in (
        ("short.npy", "same length, got 29 and 30"),
        ("wide.npy", "a column for each of the 3 classes of digits.npz, got 2 columns"),
        ("sum.npy", "must sum to 1"),
    ):
        code, _, err = neuvar(capsys, "clean", "digits.npz", "--probabilities", name)
        assert code == 2
        assert sentence in err
        assert err.count("\n") == 1
    assert not Path("out").exists()


def written_labels(kind, y):
    """The same labels in a file or folder of each kind; the words of a command that reads them."""
    rows = "".join(f"{i},{label}\n" for i, label in enumerate(y))
    Path("t.csv").write_text(f"a,label\n{rows}")
    if kind == "csv":
        return ["t.csv"]
    if kind == "npz":
        np.savez("t.npz", x=np.zeros((len(y), 2)), y=y)
        return ["t.npz"]
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.table({"a": np.arange(len(y)), "label": y}), "t.parquet")
        return ["t.parquet"]
    image = pytest.importorskip("PIL.Image")
    for i, label in enumerate(y):
        file = Path("photos", label, f"{i:03}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((4, 4), i, np.uint8)).save(file)
    files = sorted(Path("photos").rglob("*.png"))
    rows = "".join(f"{file.relative_to('photos')},{file.parent.name}\n" for file in files)
    Path("given.csv").write_text(f"file,label\n{rows}")
    return ["photos"] if kind == "folder" else ["photos", "--labels", "given.csv"]


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("csv", np.arange(12)),
        ("csv", np.arange(12.0)),
        ("csv", np.array([f"{k:03}" for k in range(12)])),
        ("npz", np.arange(12.0)),
        ("npz", np.arange(12).astype(str)),
        ("parquet", np.arange(12)),
        ("parquet", np.arange(12).astype(str)),
        ("folder", np.arange(12).astype(str)),
        ("folder with labels", np.arange(12).astype(str)),
    ],
)
def test_classes_are_in_the_order_of_numpy(capsys, kind, labels):
    """Perfect probabilities by the order of ``np.unique`` of the labels find nothing wrong."""
    y = np.repeat(labels, 3)
    words = written_labels(kind, y)
    classes, numbers = np.unique(y, return_inverse=True)
    if kind.startswith("folder"):
        numbers = np.sort(numbers)  # as its files are
    np.save("p.npy", np.eye(12)[numbers] * 0.9 + 0.1 / 12)
    code, out, err = neuvar(capsys, "clean", *words, "--probabilities", "p.npy")
    assert (code, err) == (0, "")
    assert "\n0 of 36 labels are flagged" in out
    shown = ", ".join(str(k).removesuffix(".0") for k in classes[:8])
    assert f"\norder of classes: {shown}, … (12 in all)\n" in out


def test_probabilities_of_classes_in_another_order(capsys, digits):
    """They are refused where they know less than nothing, and nothing is written."""
    np.save("moved.npy", np.roll(np.load("p.npy"), 1, axis=1))
    code, _, err = neuvar(capsys, "clean", "digits.npz", "--probabilities", "moved.npy")
    assert code == 2
    assert err.endswith(": its columns must be the classes in this order: 0, 1, 2\n")
    assert not Path("out").exists()
    np.save("even.npy", np.full((30, 3), 1 / 3))
    for name in ("even.npy", "p.npy"):
        words = ["clean", "digits.npz", "--probabilities", name, "--overwrite"]
        assert neuvar(capsys, *words)[0] == 0


def test_files_that_are_left_out_are_told(capsys, finder):
    image = pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "b/1.png"):
        Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(255 * np.eye(8, dtype=np.uint8)).save(Path("photos", name))
    for name in ("a/2.avif", "b/2.AVIF", "b/x.\x1b", "b/Thumbs.db", "b/.DS_Store", "Desktop.ini"):
        Path("photos", name).touch()
    code, out, _ = neuvar(capsys, "clean", "photos")
    assert code == 0
    told = "3 other files (.\ufffd, .avif)"
    assert out.startswith(f"left out: {told}\n2 examples of 2 classes\n")
    said = json.loads(Path("out/clean/summary.json").read_text())
    assert said["settings"]["left_out"] == told


def test_without_pillow_there_is_a_sentence_before_the_training(
    capsys, digits, finder, monkeypatch
):
    monkeypatch.setitem(sys.modules, "PIL", None)
    code, _, err = neuvar(capsys, "clean", "digits.npz")
    assert (code, err) == (2, 'neuvar: images need Pillow: pip install "neuvar[clean]"\n')
    assert finder.calls == []


def test_data_and_results_keep_apart(capsys, finder):
    image = pytest.importorskip("PIL.Image")
    for name in ("a/1.png", "b/1.png"):
        Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(255 * np.eye(8, dtype=np.uint8)).save(Path("photos", name))
    for out in ("photos", "photos/clean"):
        code, _, err = neuvar(capsys, "clean", "photos", "--out", out)
        assert code == 2
        assert "--out must not be inside photos" in err
    code, out, _ = neuvar(capsys, "clean", "photos", "--size", "4", "--out", "photos-clean")
    assert code == 0
    assert finder.calls[0][1].inputs.shape == (2, 4, 4)
    assert out.endswith("cleaned labels: column label of photos-clean/labels.csv, by file\n")
    page = Path("photos-clean/index.html").read_text()
    assert "neuvar clean photos --size 4 --decisions decisions.csv --out photos-clean" in page


def test_an_earlier_result(capsys, digits, finder):
    assert neuvar(capsys, "clean", "digits.npz")[0] == 0
    code, _, err = neuvar(capsys, "clean", "digits.npz")
    assert code == 2
    assert err == "neuvar: out/clean has an earlier result, use --overwrite to replace it\n"
    assert len(finder.calls) == 1  # it is said before the training, not after it
    assert neuvar(capsys, "clean", "digits.npz", "--overwrite", "--seed", "9")[0] == 0
    assert json.loads(Path("out/clean/summary.json").read_text())["seed"] == 9


def test_interrupted_while_training(capsys, digits, finder, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    finder.during = interrupt
    code, _, err = neuvar(capsys, "clean", "digits.npz")
    assert (code, err) == (130, "neuvar: interrupted\n")
    monkeypatch.setattr(label_issues, "LONG_TRAINING", 0)
    _, out, _ = neuvar(capsys, "clean", "digits.npz")
    assert "nothing is saved; --checkpoint FILE would save it every minute" in out
    _, out, _ = neuvar(capsys, "clean", "digits.npz", "--checkpoint", "c.pt")
    assert "c.pt is written every minute: nothing saved yet" in out
    Path("c.pt").touch()
    _, out, _ = neuvar(capsys, "clean", "digits.npz", "--checkpoint", "c.pt")
    assert "c.pt is written every minute: the same command resumes from it" in out
    assert not Path("out").exists()


def test_a_folder_that_appears_during_the_training_is_left_alone(capsys, digits, finder):
    def appear():
        Path("out/clean").mkdir(parents=True)
        Path("out/clean/mine.txt").write_text("mine")

    finder.during = appear
    code, _, err = neuvar(capsys, "clean", "digits.npz", "--overwrite")
    assert code == 2
    assert "mine.txt" in err
    assert [path.name for path in Path("out").rglob("*")] == ["clean", "mine.txt"]


def test_no_escape_reaches_the_screen(capsys):
    names = np.array(["\x1b[31mred", "ok"])[np.arange(10) % 2]
    np.savez("d.npz", x=np.zeros((10, 4), np.float32), y=names)
    p = np.eye(2)[np.arange(10) % 2] * 0.8 + 0.1
    p[1] = 0.99, 0.01
    np.save("p.npy", p)
    code, out, err = neuvar(capsys, "clean", "d.npz", "--probabilities", "p.npy")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "�[31mred" in out


def test_a_result_is_used_again_without_training(capsys, digits, monkeypatch):
    """The probabilities of a training are judged as a mean over the training."""
    p = np.load("p.npy")

    def train(model, data, *, progress, **options):
        return judge_labels(p, data.labels, names=data.names, history=True)

    monkeypatch.setattr(label_issues, "find_label_issues", train)
    assert neuvar(capsys, "clean", "digits.npz")[0] == 0
    before = Path("out/clean/issues.csv").read_bytes()
    assert b",error_probability,suggestion_probability,flagged,replaced" in before
    kept = Path("out/clean/probabilities.npz").read_bytes()
    monkeypatch.setattr(label_issues, "find_label_issues", None)
    words = "--probabilities out/clean/probabilities.npz --top 7 --export cleanlab --overwrite"
    assert neuvar(capsys, "clean", "digits.npz", *words.split())[0] == 0
    assert Path("out/clean/issues.csv").read_bytes() == before
    assert np.load("out/clean/probabilities.npz")["history"]
    assert Path("out/clean/probabilities.npz").stat().st_size == len(kept)
    assert Path("out/clean/cleanlab.csv").exists()
    assert json.loads(Path("out/clean/summary.json").read_text())["settings"] == {
        "probabilities": "out/clean/probabilities.npz"
    }
    Path("d.csv").write_text("index,given,label\n4,0,1\n")
    code, _, err = neuvar(capsys, "clean", "digits.npz", "--decisions", "d.csv", "--top", "3")
    assert code == 2
    assert err.endswith("use --probabilities out/clean/probabilities.npz --overwrite --top\n")
    for count in (1, 2):
        assert neuvar(capsys, "clean", "digits.npz", "--decisions", "d.csv")[0] == 0
        text = Path("out/clean/summary.md").read_text()
        assert text.count("decisions are applied") == 1
        assert f"\n\nYour decisions are applied to {count} of 30 labels.\n\n" in text
        Path("d.csv").write_text("index,given,label\n4,0,1\n5,2,1\n")


def test_why_nothing_is_replaced(capsys, digits):
    words = "--probabilities p.npy --replace-at 1"
    _, out, _ = neuvar(capsys, "clean", "digits.npz", *words.split())
    assert "No label is replaced: a label may be wrong, but no suggestion is right with" in out
    assert "apply your decisions with --decisions" in out


def test_decisions_are_applied_without_training(capsys, digits, monkeypatch):
    given, truth = digits
    neuvar(capsys, "clean", "digits.npz", "--probabilities", "p.npy")
    finder = Finder()
    monkeypatch.setattr(label_issues, "find_label_issues", finder)
    Path("decisions.csv").write_text(
        "index,given,suggested,decision,label\n4,0,1,reject,0\n11,0,2,other,1\n"
    )
    code, out, err = neuvar(capsys, "clean", "digits.npz", "--decisions", "decisions.csv")
    assert (code, err) == (0, "")
    assert out == ('2 decisions applied; cleaned labels: numpy.load("out/clean/labels.npy")\n')
    wanted = truth.copy()
    wanted[[4, 11]] = 0, 1
    assert (np.load("out/clean/labels.npy") == wanted).all()
    assert [int(row["label"]) for row in rows_of("out/clean/labels.csv")] == wanted.tolist()
    assert finder.calls == []
    assert (given[[4, 11]] == 0).all()


def test_help_has_examples(capsys):
    code, out, _ = neuvar(capsys, "clean", "--help")
    assert code == 0
    assert "\nexamples:\n  neuvar clean photos " in out
    for name, value in TRAINING.items():
        assert f"--{name.replace('_', '-')} " in out
        if value is not None:
            assert f"(default: {value})" in " ".join(out.split())
    assert "clean" in neuvar(capsys, "--help")[1]


def noisy_digits(count):
    train = mnist_excerpt().train
    noisy = corrupt("symmetric", train.labels[:count], 0.2, classes=10, seed=0)
    np.savez("digits.npz", images=train.images[:count].numpy(), labels=noisy.noisy.numpy())
    return noisy


def test_the_real_thing_finds_wrong_labels(capsys):
    """One training on the excerpt: most of the worst are wrong, and the same seed says the same."""
    noisy = noisy_digits(1000)
    words = ["clean", "digits.npz", "--b", "0.03", "--epochs", "12", "--seed", "1", "--out"]
    for out in ("one", "two"):
        code, _, err = neuvar(capsys, *words, out)
        assert (code, err) == (0, "")
    for name in ("issues.csv", "labels.csv"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()
    worst = [int(row["index"]) for row in rows_of("one/issues.csv")[:100]]
    assert noisy.mask.numpy()[worst].mean() > 0.8
    given, clean_labels = noisy.noisy.numpy(), noisy.clean.numpy()
    right = (given == clean_labels).sum()
    # With so few images it may be that no suggestion is sure enough to replace a label.
    assert (np.load("one/labels.npy") == clean_labels).sum() >= right
    suggested = given.copy()
    for row in rows_of("one/issues.csv"):
        if row["flagged"] == "true":
            suggested[int(row["index"])] = int(row["suggested"])
    assert (suggested == clean_labels).sum() > right + 50


@pytest.mark.slow
def test_control_c_leaves_nothing_behind(here):
    """A real interrupt in the middle of a real training."""
    noisy_digits(1000)
    command = [sys.executable, "-m", "neuvar", "clean", "digits.npz", "--b", "0.03"]
    process = subprocess.Popen(
        [*command, "--epochs", "200", "--out", "deep/out"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == "1,000 examples of 10 classes\n"
    began = process.stdout.readline()  # on a busy machine, the first line is an estimate
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert began.startswith(("trained to ", "training, about "))
    assert (process.returncode, err) == (130, "neuvar: interrupted\n")
    assert [path.name for path in here.iterdir()] == ["digits.npz"]


def test_lines_are_few(capsys, quick):
    with progress.training_progress() as show:
        for fraction in np.linspace(0, 1, 1001):
            show(float(fraction))
    assert capsys.readouterr().out.count("\n") == 9


def test_duplicates_are_written_with_different_labels_first(capsys, here):
    x = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    x[10], x[20], x[30] = x[11], x[2] + 1e-4, x[3]
    labels = np.arange(60) % 2
    labels[10], labels[20], labels[30] = labels[11], 1 - labels[2], labels[3]
    np.savez("points.npz", x=x, y=labels)
    np.save("p.npy", np.eye(2)[labels] * 0.8 + 0.1)
    code, out, _ = neuvar(capsys, "clean", "points.npz", "--probabilities", "p.npy", "--duplicates")
    assert code == 0
    assert (
        "6 of 60 examples are in 3 groups of duplicates; the labels of 1 group differ: "
        "out/clean/duplicates.csv\n" in out
    )
    rows = rows_of("out/clean/duplicates.csv")
    assert [row["index"] for row in rows] == ["2", "20", "3", "30", "10", "11"]
    assert [row["group"] for row in rows] == ["0", "0", "1", "1", "2", "2"]
    assert [row["labels_differ"] for row in rows] == ["true"] * 2 + ["false"] * 4


def test_a_checkpoint_is_used_and_removed_at_the_end(capsys, digits, finder):
    def save():
        Path("half.pt").write_bytes(b"")
        raise KeyboardInterrupt

    finder.during = save
    assert neuvar(capsys, "clean", "digits.npz", "--checkpoint", "half.pt")[0] == 130
    assert Path("half.pt").exists()
    finder.during = lambda: None
    assert neuvar(capsys, "clean", "digits.npz", "--checkpoint", "half.pt")[0] == 0
    assert [options["checkpoint"] for _, _, options in finder.calls] == [Path("half.pt")] * 2
    assert not Path("half.pt").exists()


def test_features_are_standardized_in_parts(monkeypatch):
    x = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)) * 7 + 2
    x[:, 1] = 0.1
    examples = Examples(x, np.zeros(50, dtype=np.int64), ("a", "b"))
    whole = standardize(examples).inputs
    monkeypatch.setattr(label_issues, "STANDARDIZED_AT_ONCE", 30)
    parts = standardize(examples).inputs
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(parts[:, ::2].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(parts[:, ::2].std(0, correction=0), torch.ones(2))
    assert not parts[:, 1].any()


def test_a_linear_model_has_no_training_options(capsys, digits):
    np.savez("points.npz", x=np.random.default_rng(0).normal(size=(40, 3)), y=np.arange(40) % 2)
    for option in (["--epochs", "3"], ["--checkpoint", "c.pt"]):
        code, _, err = neuvar(capsys, "clean", "points.npz", "--model", "linear", *option)
        assert code == 2
        assert err.startswith(f"neuvar: {option[0]} has no effect on a linear model")
    words = ("--model", "linear", "--probabilities", "p.npy")
    code, _, err = neuvar(capsys, "clean", "digits.npz", *words)
    assert (code, err[:40]) == (2, "neuvar: --model must not be given with -")
    code, out, _ = neuvar(capsys, "clean", "points.npz", "--model", "linear", "--seed", "3")
    assert code == 0
    assert "logistic regression, fitted in five folds" in out
    assert json.loads(Path("out/clean/summary.json").read_text())["seed"] == 3


def test_a_linear_model_sees_text_at_its_own_scale(capsys, monkeypatch):
    rows = [f"{i * 100},a {'goal' if i % 2 else 'rain'} for {i} people,{i % 2}" for i in range(40)]
    Path("t.csv").write_text("points,note,label\n" + "\n".join(rows) + "\n")
    seen = []
    monkeypatch.setattr(
        label_issues,
        "find_label_issues",
        lambda model, data, **options: (
            seen.append(data) or find_label_issues(model, data, **options)
        ),
    )
    assert neuvar(capsys, "clean", "t.csv")[0] == 0
    spread = seen[0].inputs.std(0, correction=0)
    torch.testing.assert_close(spread[0], torch.tensor(1.0))  # points
    assert (spread[1:] < 0.9).all()  # the text; standardized, it would be 1


def test_a_row_with_too_few_fields_is_named(capsys):
    Path("t.csv").write_text("a,b,label\n1,2,x\n3,y\n4,5,x\n")
    code, _, err = neuvar(capsys, "clean", "t.csv")
    sentence = "line 3, column 'label' is empty: the line has 2 of 3 fields"
    assert (code, err) == (2, f"neuvar: t.csv: {sentence}\n")
    Path("t.csv").write_text("a,b,label\n1,2,x\n3,4,\n4,5,x\n")
    code, _, err = neuvar(capsys, "clean", "t.csv")
    assert (code, err) == (2, "neuvar: t.csv: line 3, column 'label' is empty\n")
