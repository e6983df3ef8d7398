"""Files for cleanlab and Label Studio."""

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest

from neuvar.cleaning import export_cleanlab, export_label_studio, find_label_issues
from neuvar.cleaning.results import FILES
from tests.test_cli_clean import digits, here, neuvar  # noqa: F401 - fixtures

NAMES = ("cat", 'eel "<&>"', "owl")


@pytest.fixture
def issues():
    """90 labels of which five are wrong."""
    rng = np.random.default_rng(0)
    truth = np.arange(90) % 3
    p = 0.05 * rng.random((90, 3)) + 0.9 * np.eye(3)[truth]
    given = truth.copy()
    given[:5] = (truth[:5] + 1) % 3
    return find_label_issues(p / p.sum(1, keepdims=True), given, names=NAMES)


class TestCleanlab:
    def test_columns_are_those_of_cleanlab(self, issues, tmp_path):
        pandas = pytest.importorskip("pandas")
        classification = pytest.importorskip("cleanlab.classification")
        export_cleanlab(issues, tmp_path / "cleanlab.csv")
        ours = pandas.read_csv(tmp_path / "cleanlab.csv")
        theirs = classification.CleanLearning().find_label_issues(
            labels=issues.labels, pred_probs=issues.probabilities
        )
        assert list(ours.columns) == list(theirs.columns)
        kinds = [[frame[c].dtype.kind for c in frame.columns] for frame in (ours, theirs)]
        assert kinds[0] == kinds[1]
        assert ours.index.equals(theirs.index)
        # On clear data both agree on all but the scale of the quality.
        for column in ("is_label_issue", "given_label", "predicted_label"):
            assert ours[column].tolist() == theirs[column].tolist()
        assert (ours.label_quality == issues.quality).all()

    def test_cleanlab_takes_it(self, issues, tmp_path):
        pandas = pytest.importorskip("pandas")
        classification = pytest.importorskip("cleanlab.classification")
        export_cleanlab(issues, tmp_path / "cleanlab.csv")
        learner = classification.CleanLearning()
        loaded = pandas.read_csv(tmp_path / "cleanlab.csv")
        learner.fit(issues.probabilities, issues.labels, label_issues=loaded)
        assert (learner.label_issues_mask == issues.flagged).all()
        with pytest.raises(ValueError, match="labels must match"):
            learner.fit(issues.probabilities, (issues.labels + 1) % 3, label_issues=loaded)


def check_tasks(tasks, config):
    """The documented form: data, and predictions that fit the labeling configuration."""
    view = ElementTree.fromstring(config)
    assert view.tag == "View"
    (choices,) = view.findall("Choices")
    (shown,) = [e for e in view if e.get("name") == choices.get("toName")]
    classes = [choice.get("value") for choice in choices.findall("Choice")]
    assert len(set(classes)) == len(classes)
    for task in tasks:
        assert set(task) == {"data", "predictions"}
        assert shown.get("value").removeprefix("$") in task["data"]
        (prediction,) = task["predictions"]
        assert set(prediction) == {"model_version", "score", "result"}
        assert prediction["model_version"].startswith("neuvar ")
        assert 0 <= prediction["score"] <= 1
        (result,) = prediction["result"]
        assert result["from_name"] == choices.get("name")
        assert result["to_name"] == choices.get("toName")
        assert result["type"] == "choices"
        (chosen,) = result["value"]["choices"]
        assert chosen in classes
        assert task["data"]["given_label"] in classes
    return shown.tag, classes


class TestLabelStudio:
    def test_tasks_have_the_documented_form(self, issues, tmp_path):
        texts = [f"text {i}" for i in range(90)]
        export_label_studio(issues, tmp_path / "a.json", texts, kind="text")
        tasks = json.loads((tmp_path / "a.json").read_text())
        tag, classes = check_tasks(tasks, (tmp_path / "a.xml").read_text())
        assert tag == "Text"
        assert classes == list(NAMES)
        worst = issues.worst.tolist()
        assert sorted(worst) == [0, 1, 2, 3, 4]
        assert [task["data"]["text"] for task in tasks] == [texts[i] for i in worst]
        assert [task["data"]["id"] for task in tasks] == worst
        given = [NAMES[issues.labels[i]] for i in worst]
        assert [task["data"]["given_label"] for task in tasks] == given
        for i, task in zip(worst, tasks, strict=True):
            (prediction,) = task["predictions"]
            assert prediction["result"][0]["value"] == {"choices": [NAMES[issues.suggested[i]]]}
            assert prediction["score"] == pytest.approx(issues.suggestion_probability[i], rel=1e-5)

    @pytest.mark.parametrize("kind", ["image", "audio", "table"])
    def test_kinds(self, issues, tmp_path, kind):
        data = [{"a": i} if kind == "table" else f"https://example.org/{i}" for i in range(90)]
        export_label_studio(issues, tmp_path / "a.json", data, kind=kind)
        tasks = json.loads((tmp_path / "a.json").read_text())
        tag, _ = check_tasks(tasks, (tmp_path / "a.xml").read_text())
        assert tag.lower() == kind
        assert tasks[0]["data"][kind] == data[issues.worst[0]]

    def test_refusals(self, issues, tmp_path):
        path = tmp_path / "a.json"
        with pytest.raises(ValueError, match=r"kind must be .*image.* got 'video'"):
            export_label_studio(issues, path, [""] * 90, kind="video")
        with pytest.raises(ValueError, match="one element for each of 90 examples, got 3"):
            export_label_studio(issues, path, ["", "", ""])
        with pytest.raises(ValueError, match=r"path must end in \.json, got 'a.txt'"):
            export_label_studio(issues, tmp_path / "a.txt", [""] * 90)
        assert not list(tmp_path.iterdir())


class TestCommand:
    def probabilities(self, labels, wrong):
        p = np.eye(2)[labels] * 0.98 + 0.01
        p[wrong] = p[wrong, ::-1]
        np.save("p.npy", p)

    def run(self, capsys, data, *words):
        base = ("--probabilities", "p.npy", "--export", "labelstudio", "cleanlab", "--out", "out")
        code, said, problem = neuvar(capsys, "clean", data, *base, *words)
        assert code == 0, problem
        assert f"for cleanlab: {Path('out', 'cleanlab.csv')}" in said
        assert f"for Label Studio: {Path('out', 'label_studio.json')}" in said
        tasks = json.loads(Path("out/label_studio.json").read_text())
        tag, _ = check_tasks(tasks, Path("out/label_studio.xml").read_text())
        return tag, tasks

    def test_folder(self, capsys):
        image = pytest.importorskip("PIL.Image")
        rng = np.random.default_rng(0)
        for i in range(40):
            path = Path("my photos", "ab"[i // 20], f"{i} ü&.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(path)
        files = sorted(path.as_posix() for path in Path("my photos").rglob("*.png"))
        wrong = files.index("my photos/a/7 ü&.png")
        self.probabilities(np.arange(40) // 20, wrong)
        tag, tasks = self.run(capsys, "my photos")
        assert tag == "Image"
        (task,) = tasks
        assert task["data"]["id"] == "a/7 ü&.png"
        address = urlsplit(task["data"]["image"])
        assert address.path == "/data/local-files/"
        assert parse_qs(address.query) == {"d": ["my photos/a/7 ü&.png"]}
        assert {path.name for path in Path("out").iterdir()} <= FILES
        # An earlier result with exports may be replaced.
        words = ("clean", "my photos", "--probabilities", "p.npy", "--out", "out", "--overwrite")
        assert neuvar(capsys, *words)[0] == 0
        assert not Path("out/cleanlab.csv").exists()

    @pytest.mark.parametrize("kind", ["numbers", "mixed", "text"])
    def test_table(self, capsys, kind):
        pytest.importorskip("sklearn")
        labels = np.arange(40) % 2
        self.probabilities(labels, 6)
        sentences = [f"a sentence of number {i} with words" for i in range(40)]
        columns = {
            "numbers": {"width": [f"{i / 7:.3f}" for i in range(40)], "height": ["2", "3"] * 20},
            "mixed": {"width": [str(2 * i) for i in range(40)], "colour": ["red", "blue"] * 20},
            "text": {"title": sentences},
        }[kind]
        lines = [",".join([*columns, "label"])]
        lines += [
            ",".join([*(cells[i] for cells in columns.values()), f"k{labels[i]}"])
            for i in range(40)
        ]
        Path("t.csv").write_text("\n".join(lines) + "\n")
        tag, tasks = self.run(capsys, "t.csv")
        (task,) = tasks
        assert task["data"]["id"] == "6"
        if kind == "text":
            assert (tag, task["data"]["text"]) == ("Text", sentences[6])
        else:
            assert tag == "Table"
            shown = task["data"]["table"]
            assert list(shown) == list(columns)
            assert float(shown["width"]) == pytest.approx(float(columns["width"][6]))

    def test_refusals(self, capsys, digits):  # noqa: F811
        words = ("clean", "digits.npz", "--probabilities", "p.npy", "--export")
        code, _, said = neuvar(capsys, *words, "labelstudio")
        assert code != 0
        assert "--export labelstudio needs a folder of images or a table" in said
        assert not Path("out").exists()
        assert neuvar(capsys, *words, "cleanlab")[0] == 0
        assert len(Path("out/clean/cleanlab.csv").read_text().splitlines()) == 31
        code, _, said = neuvar(capsys, *words, "labelbox")
        assert code != 0
        assert "invalid choice: 'labelbox'" in said
        decisions = ("clean", "digits.npz", "--decisions", "d.csv", "--export", "cleanlab")
        assert "--export must not be given with --decisions" in neuvar(capsys, *decisions)[2]
        observed = ("clean", "--observed", "o.pt", "--export", "cleanlab")
        assert "--export must not be given without DATA" in neuvar(capsys, *observed)[2]
