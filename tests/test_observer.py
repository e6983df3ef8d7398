"""The observer: mean probabilities of any training, judged as means over a training are judged."""

import csv
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from neuvar import NVRMSGD, LabelObserver
from neuvar.cleaning import judge_labels
from neuvar.cli import main
from tests import observer_worker
from tests.conftest import PATIENCE
from tests.observed import CLASSES, EXAMPLES, batches, labels, mean_probabilities


def observed(seen=None, **options):
    observer = LabelObserver(EXAMPLES, CLASSES, **options)
    for batch in batches() if seen is None else seen:
        observer.update(*batch)
    return observer


def means(observer):
    sums = observer.state_dict()["sums"]
    return sums / sums.sum(1, keepdim=True)


def agree(first, second):
    """Whether two judgements are the same; probabilities may be rounded once more."""
    decided = ("labels", "flagged", "suggested")
    return (
        all(np.array_equal(getattr(first, name), getattr(second, name)) for name in decided)
        and np.allclose(first.quality, second.quality, atol=1e-5)
        and str(first) == str(second)
    )


def same_issues(first, second):
    return all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in ("labels", "flagged", "suggested", "ranked", "quality", "probabilities")
    )


def test_it_averages_the_probabilities():
    p = observed().label_issues().probabilities
    np.testing.assert_allclose(p, mean_probabilities(batches()), atol=1e-6)


def test_issues_are_those_of_judge_labels_on_the_same_probabilities():
    observer = observed()
    issues = observer.label_issues()
    given = judge_labels(means(observer), labels(), history=True)
    assert issues.flagged.any()
    assert agree(issues, given)
    by_hand = judge_labels(mean_probabilities(batches()).numpy(), labels(), history=True)
    assert np.array_equal(issues.flagged, by_hand.flagged)
    assert np.array_equal(issues.suggested, by_hand.suggested)


def test_a_plain_loop_finds_its_wrong_labels():
    generator = torch.Generator().manual_seed(0)
    true = torch.arange(300) % 3
    inputs = torch.randn(300, 5, generator=generator)
    inputs[torch.arange(300), true] += 5
    given = torch.where(torch.arange(300) % 10 == 0, (true + 1) % 3, true)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer, observer = NVRMSGD(model, lr=0.1, b=0.05), LabelObserver(300, 3)
    for _ in range(10):
        for i in torch.randperm(300, generator=generator).split(50):
            logits = model(inputs[i])
            observer.update(i, logits, given[i])
            optimizer.zero_grad()
            cross_entropy(logits, given[i]).backward()
            optimizer.step()
    issues = observer.label_issues()
    wrong = (given != true).numpy()
    assert (issues.flagged & wrong).sum() >= 0.9 * wrong.sum()
    assert agree(issues, judge_labels(means(observer), given, history=True))
    assert not observer.state_dict()["sums"].requires_grad


def test_an_example_counts_each_time_it_is_seen():
    observer = LabelObserver(2, 2)
    logits = torch.tensor([[0.9, 0.1], [0.5, 0.5], [0.1, 0.9], [0.7, 0.3]]).log()
    observer.update([0, 0, 1, 0], logits, [0, 0, 1, 0])
    np.testing.assert_allclose(
        observer.label_issues().probabilities, [[0.7, 0.3], [0.1, 0.9]], atol=1e-6
    )


def test_examples_never_seen_are_reported_and_not_flagged():
    seen = [(i[i >= 7], z[i >= 7], y[i >= 7]) for i, z, y in batches()]
    observer = observed(seen)
    issues = observer.label_issues()
    alone = judge_labels(issues.probabilities[7:], labels()[7:], history=True)
    assert issues.unseen.tolist() == list(range(7))
    assert not issues.flagged[:7].any()
    assert np.array_equal(issues.flagged[7:], alone.flagged)
    assert np.array_equal(issues.worst, alone.worst + 7)
    assert issues.noise_rate == alone.noise_rate
    assert issues.labels[:7].tolist() == [-1] * 7
    assert str(issues).endswith("7 examples were never seen")
    with pytest.raises(ValueError, match="7 of 60 labels are not known"):
        _ = issues.cleaned
    known = observer.label_issues(labels())
    assert np.array_equal(known.labels, labels())
    assert np.array_equal(known.cleaned[:7], labels()[:7])
    assert np.array_equal(known.flagged, issues.flagged)


def test_logits_in_half_precision_and_with_gradients():
    low = observed((i, z.bfloat16().requires_grad_(), y) for i, z, y in batches())
    exact = observed((i, z.bfloat16().float(), y) for i, z, y in batches())
    assert torch.equal(low.state_dict()["sums"], exact.state_dict()["sums"])


def test_rows_with_nan_are_skipped():
    bad = [
        (torch.tensor([4, 5]), torch.tensor([[torch.nan, 1, 1], [torch.inf, 1, 1]]), labels()[4:6])
    ]
    observer = observed([*batches(), *bad])
    assert torch.equal(observer.state_dict()["sums"], observed().state_dict()["sums"])


@pytest.mark.parametrize("at", [0, 1, 7, 16])
def test_resume_equals_an_uninterrupted_run(tmp_path, at):
    first = observed(itertools.islice(batches(), at))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = LabelObserver(EXAMPLES, CLASSES)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for batch in itertools.islice(batches(), at, None):
        second.update(*batch)
    assert same_issues(second.label_issues(), observed().label_issues())


def test_a_state_is_a_copy():
    observer = observed(itertools.islice(batches(), 3))
    state = observer.state_dict()
    before = state["sums"].clone()
    other = LabelObserver(EXAMPLES, CLASSES)
    other.load_state_dict(state)
    for changed in (observer, other):
        changed.update(*next(batches()))
    assert torch.equal(state["sums"], before)


def test_save_and_load_keep_the_names(tmp_path):
    observer = observed(names=("cat", "dog", "cow"))
    observer.save(tmp_path / "observed.pt")
    loaded = LabelObserver.load(tmp_path / "observed.pt")
    assert loaded.label_issues().names == ("cat", "dog", "cow")
    assert same_issues(loaded.label_issues(), observer.label_issues())


def test_memory_is_what_the_docstring_says():
    state = LabelObserver(1000, 7).state_dict()
    assert state["sums"].nbytes + state["labels"].nbytes == 1000 * 7 * 4 + 1000 * 8


GOOD = ([0, 1], torch.zeros(2, 3), [0, 1])


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, [0, 60], "indices must be from 0 to 59, got 60"),
        (0, [-1, 0], "indices must be from 0 to 59, got -1"),
        (0, [0], "indices must be 2 integers, one for each row of logits"),
        (0, [0.5, 1.0], "indices must be 2 integers.*float32"),
        (0, [True, False], "indices must be 2 integers.*bool"),
        (1, torch.zeros(2, 4), r"logits must have the shape \(n, 3\), got \(2, 4\)"),
        (1, torch.zeros(2), r"logits must have the shape \(n, 3\), got \(2,\)"),
        (1, [[0.0] * 3] * 2, r"logits must have the shape \(n, 3\), got list"),
        (2, [0, 3], "labels must be from 0 to 2, got 3"),
        (2, [0, -100], "labels must be from 0 to 2, got -100"),
        (2, torch.full((2, 3), 1 / 3), "labels must be 2 integers"),
        (2, [0, 2], "labels must not change during training, example 1 had 1 and now has 2"),
    ],
)  # fmt: skip
def test_a_bad_batch_gets_a_sentence_and_changes_nothing(position, value, message):
    observer = LabelObserver(60, 3)
    observer.update(*GOOD)
    before = observer.state_dict()
    batch = list(GOOD)
    batch[position] = value
    with pytest.raises(ValueError, match=message):
        observer.update(*batch)
    after = observer.state_dict()
    assert torch.equal(before["sums"], after["sums"])
    assert torch.equal(before["labels"], after["labels"])


def test_two_labels_in_one_batch_are_refused():
    with pytest.raises(ValueError, match="labels must not change"):
        LabelObserver(60, 3).update([5, 5], torch.zeros(2, 3), [0, 1])


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([2, 0, 0], "indices must be from 0 to 59, but 2 of them were not"),
        ([0, 3, 0], "labels must be from 0 to 2, but 3 of them were not"),
        ([0, 0, 4], "labels must not change during training, but 4 of them did"),
    ],
)
def test_problems_counted_on_a_device_are_raised_later(problems, message):
    observer = observed()
    observer._problems += torch.tensor(problems)
    with pytest.raises(ValueError, match=message):
        observer.label_issues()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"examples": 0, "classes": 3}, "examples must be an integer >= 1, got 0"),
        ({"examples": 60, "classes": 1}, "classes must be an integer >= 2, got 1"),
        ({"examples": 60, "classes": 3, "names": "ab"}, "names must have 3 entries"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        LabelObserver(**arguments)


def test_without_updates_there_is_nothing_to_judge():
    with pytest.raises(ValueError, match="has seen no example"):
        LabelObserver(60, 3).label_issues()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (labels()[:-1], "labels must be 60 class indices"),
        (torch.roll(labels(), 1), "labels must be those of the training, .* of 60 are not"),
        (labels() / 2, "labels must be 60 class indices, got float32"),
    ],
)
def test_other_labels_than_those_of_the_training_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        observed().label_issues(given)


def test_a_foreign_state_is_refused(tmp_path):
    observer = LabelObserver(60, 3)
    with pytest.raises(ValueError, match="not that of a LabelObserver"):
        observer.load_state_dict({"state": {}})
    with pytest.raises(ValueError, match="must be of 60 examples and 3 classes"):
        observer.load_state_dict(LabelObserver(60, 4).state_dict())
    for content in (b"", b"no", b"PK\x03\x04"):
        (tmp_path / "file.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a file of LabelObserver\.save"):
            LabelObserver.load(tmp_path / "file.pt")
    torch.save([1], tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"is not a file of LabelObserver\.save"):
        LabelObserver.load(tmp_path / "file.pt")


# The page.


def clean(*words):
    assert main(["clean", *map(str, words)]) == 0


def flagged_in(folder):
    with (folder / "issues.csv").open(newline="") as file:
        return sorted(int(row["index"]) for row in csv.DictReader(file) if row["flagged"] == "true")


def test_the_page_opens_without_data(tmp_path, capsys):
    observer = observed((i[i >= 7], z[i >= 7], y[i >= 7]) for i, z, y in batches())
    file, out = tmp_path / "observed.pt", tmp_path / "out"
    observer.save(file)
    clean("--observed", file, "--out", out)
    assert "never seen in training, not judged: 7 examples" in capsys.readouterr().out
    worst = observer.label_issues().worst
    assert flagged_in(out) == sorted(worst)
    page = (out / "index.html").read_text()
    assert "your network disagreed with" in page
    assert "data:image/png" not in page
    summary = json.loads((out / "summary.json").read_text())
    assert summary["settings"]["never_seen"] == 7
    decisions = tmp_path / "decisions.csv"
    index = int(worst[0])
    given = int(labels()[index])
    decisions.write_text(f"index,given,suggested,decision,label\n{index},{given},0,other,{given}\n")
    clean("--observed", file, "--decisions", decisions, "--out", out)
    rows = dict(line.split(",") for line in (out / "labels.csv").read_text().splitlines()[1:])
    assert len(rows) == EXAMPLES - 7
    assert rows[str(index)] == str(given)


def test_the_page_opens_with_data(tmp_path):
    observer = observed((i[i >= 7], z[i >= 7], y[i >= 7]) for i, z, y in batches())
    observer.save(tmp_path / "observed.pt")
    images = np.zeros((EXAMPLES, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=images, labels=labels().numpy())
    out = tmp_path / "out"
    clean(tmp_path / "data.npz", "--observed", tmp_path / "observed.pt", "--out", out)
    assert flagged_in(out) == sorted(observer.label_issues().worst)
    assert "data:image/png" in (out / "index.html").read_text()
    assert np.array_equal(np.load(out / "labels.npy"), observer.label_issues(labels()).cleaned)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "DATA must be given, or --observed FILE"),
        (["--observed", "none.pt"], "there is no none.pt; --observed must be a file of"),
        (["--observed", "good.pt", "--size", "8"], "--size must not be given without DATA"),
        (["--observed", "good.pt", "--lr", "0.1"], "--lr must not be given with --observed"),
        (["--observed", "good.pt", "--probabilities", "p.npy"],
         "--probabilities must not be given with --observed"),
        (["short.npz", "--observed", "good.pt"], "which has 30 examples, not 60"),
        (["other.npz", "--observed", "good.pt"], "labels must be those of the training"),
    ],
)  # fmt: skip
def test_bad_options_get_a_sentence(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    observed().save("good.pt")
    inputs = np.zeros((60, 2))
    np.savez("short.npz", inputs=inputs[:30], labels=labels().numpy()[:30])
    np.savez("other.npz", inputs=inputs, labels=np.roll(labels().numpy(), 1))
    assert main(["clean", *words]) != 0
    assert message in capsys.readouterr().err


# Several processes.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observer")
    subprocess.run(
        [sys.executable, "-m", observer_worker.__name__, str(folder)],
        cwd=Path(observer_worker.__file__).parents[1], check=True, timeout=PATIENCE,
    )  # fmt: skip
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(observer_worker.RANKS)]


@pytest.mark.distributed
def test_ranks_are_added_up(ranks):
    folder, reports = ranks
    whole = observed()
    gathered = LabelObserver.load(folder / "observed.pt")
    torch.testing.assert_close(gathered.state_dict()["sums"], whole.state_dict()["sums"])
    assert torch.equal(gathered.state_dict()["labels"], labels())
    for report in reports:
        assert np.array_equal(report["flagged"], whole.label_issues().flagged)
        torch.testing.assert_close(report["resumed"], whole.state_dict()["sums"])


@pytest.mark.distributed
def test_a_label_that_differs_between_ranks_is_refused_on_all(ranks):
    _, reports = ranks
    assert all("labels must not change during training" in report["error"] for report in reports)
