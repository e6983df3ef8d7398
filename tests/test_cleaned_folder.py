"""The folder of images with cleaned labels: copies, links, names that collide, refusals."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from neuvar.cleaning import cleaned_folder
from neuvar.cleaning.cleaned_folder import assign_paths
from tests.test_cli_clean import neuvar

Image = pytest.importorskip("PIL.Image")
CLASSES = ("cat", "dog")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def photos():
    """40 images; cat/00.png is a dog, and dog/00.png is there already. The rest is right."""
    rng = np.random.default_rng(0)
    files = [f"{name}/{i:02}.png" for name in CLASSES for i in range(20)]
    for file in files:
        Path("photos", file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(Path("photos", file))
    truth = np.arange(40) // 20
    truth[0] = 1
    p = np.full((40, 2), 0.01)
    p[np.arange(40), truth] = 0.99
    np.save("p.npy", p)
    return Path("photos")


def content(folder):
    """Bytes of each file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def run(capsys, *words):
    base = ("clean", "photos", "--probabilities", "p.npy", "--out", "out", "--overwrite")
    return neuvar(capsys, *base, *words)


def expected_of(photos):
    before = content(photos)
    after = {name: before[name] for name in before if name != "cat/00.png"}
    return before, after | {"dog/00-from-cat.png": before["cat/00.png"]}


def test_copies_by_default(capsys, photos):
    before, expected = expected_of(photos)
    os.utime(photos / "cat/01.png", (10**9, 10**9))
    code, said, _ = run(capsys, "--cleaned-folder", "new/clean")
    assert code == 0
    assert content("new/clean") == expected
    assert content(photos) == before
    assert "cleaned folder: new/clean, 40 copies, 1 in another class" in said
    assert "1 renamed because the name was taken: cat/00.png is now dog/00-from-cat.png" in said
    assert Path("new/clean/cat/01.png").stat().st_mtime == 10**9
    assert not Path("new/clean/cat/01.png").samefile(photos / "cat/01.png")
    assert [path.name for path in Path("new").iterdir()] == ["clean"]


def test_links_on_demand(capsys, photos, monkeypatch):
    before, expected = expected_of(photos)
    code, said, _ = run(capsys, "--cleaned-folder", "clean", "--link")
    assert code == 0
    assert content("clean") == expected
    assert "cleaned folder: clean, 40 links, 1 in another class" in said
    assert Path("clean/dog/00-from-cat.png").samefile(photos / "cat/00.png")

    real = os.link

    def other_disk(old, new):
        if Path(old).parent.name == "dog":
            raise OSError(18, "Invalid cross-device link")
        real(old, new)

    monkeypatch.setattr(os, "link", other_disk)
    code, said, _ = run(capsys, "--cleaned-folder", "mixed", "--link")
    assert code == 0
    assert content("mixed") == expected
    assert "mixed, 20 links and 20 copies" in said
    assert content(photos) == before


def test_a_link_to_a_file_becomes_a_file(capsys, photos):
    (photos / "cat/05.png").rename("elsewhere.png")
    (photos / "cat/05.png").symlink_to(Path("elsewhere.png").resolve())
    for words in ((), ("--link",)):
        folder = f"clean{len(words)}"
        assert run(capsys, "--cleaned-folder", folder, *words)[0] == 0
        copy = Path(folder, "cat/05.png")
        assert not copy.is_symlink()
        assert copy.read_bytes() == Path("elsewhere.png").read_bytes()
        assert copy.samefile("elsewhere.png") == bool(words)


def test_decisions_are_applied(capsys, photos):
    before, _ = expected_of(photos)
    assert run(capsys)[0] == 0
    rows = [("file", "given", "suggested", "decision", "label")]
    rows += [("dog/07.png", "dog", "dog", "other", "cat")]
    with Path("decisions.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    words = ("clean", "photos", "--out", "out", "--decisions", "decisions.csv")
    code, said, _ = neuvar(capsys, *words, "--cleaned-folder", "clean")
    assert code == 0
    expected = {name: before[name] for name in before if name != "dog/07.png"}
    assert content("clean") == expected | {"cat/07-from-dog.png": before["dog/07.png"]}
    assert "1 decision applied" in said


def test_labels_from_a_file_make_the_folders(capsys):
    Path("photos/deep").mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = [f"{i:02}.png" for i in range(20)] + ["deep/1.png"]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(Path("photos", file))
    names = ["cat", "dog"]
    lines = [f"{file},{names[i % 2]}" for i, file in enumerate(files)]
    Path("labels.csv").write_text("\n".join(["file,label", *lines]) + "\n")
    np.save("p.npy", np.eye(2)[np.arange(21) % 2] * 0.98 + 0.01)
    code, *_ = run(capsys, "--labels", "labels.csv", "--cleaned-folder", "clean")
    assert code == 0
    names_of = {name: path for name in CLASSES for path in content(Path("clean", name))}
    assert set(content("clean")) == {f"{names[i % 2]}/{file}" for i, file in enumerate(files)}
    assert set(names_of) == set(CLASSES)
    # The same with a class that would leave the folder.
    for bad in ("..", "a/b", "."):
        Path("labels.csv").write_text("\n".join(["file,label", *lines]).replace("dog", bad) + "\n")
        Path("p.npy").unlink()
        order = sorted(("cat", bad))
        np.save("p.npy", np.eye(2)[[order.index(("cat", bad)[i % 2]) for i in range(21)]])
        code, _, said = run(capsys, "--labels", "labels.csv", "--cleaned-folder", "other")
        assert code != 0
        assert f"--cleaned-folder needs classes that can be folder names, got {bad!r}" in said
        assert not Path("other").exists()


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("photos/clean", "must not overlap with photos"),
        ("photos/cat/clean", "must not overlap with photos"),
        ("photos", "must not overlap with photos"),
        (".", "must not overlap with photos"),
        ("out/clean", "must not overlap with --out out"),
        ("linked/new", "must not overlap with photos"),
        ("full", "must be a new or an empty folder, full is not empty"),
        ("p.npy", "must be a folder, p.npy is a file"),
    ],
)
def test_refused_before_anything_is_computed(capsys, photos, folder, reason):
    Path("elsewhere").mkdir()
    (photos / "eel").symlink_to(Path("elsewhere").resolve())
    Path("linked").symlink_to("elsewhere")
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    before = content(".")
    code, _, said = run(capsys, "--cleaned-folder", folder)
    assert code != 0
    assert f"--cleaned-folder {reason}" in said
    assert content(".") == before
    assert not Path("out").exists()


def test_an_empty_folder_is_filled(capsys, photos):
    Path("clean").mkdir()
    assert run(capsys, "--cleaned-folder", "clean")[0] == 0
    assert content("clean") == expected_of(photos)[1]


def test_options_without_effect_are_refused(capsys, photos):
    assert "--link must not be given without --cleaned-folder" in run(capsys, "--link")[2]
    np.savez("a.npz", images=np.zeros((4, 3, 3)), labels=[0, 1, 0, 1])
    code, _, said = neuvar(capsys, "clean", "a.npz", "--cleaned-folder", "clean")
    assert code != 0
    assert "--cleaned-folder is for folders of images, got a.npz" in said


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_behind(capsys, photos, monkeypatch, error):
    real, done = cleaned_folder.shutil.copy2, []

    def full(old, new):
        if len(done) == 7:
            raise error
        done.append(new)
        return real(old, new)

    monkeypatch.setattr(cleaned_folder.shutil, "copy2", full)
    before = content(photos)
    code, _, said = run(capsys, "--cleaned-folder", "new/clean")
    assert code != 0
    assert len(done) == 7
    assert not Path("new").exists()
    assert content(photos) == before
    if isinstance(error, OSError):
        assert "No space left on device" in said


def test_a_folder_that_fills_meanwhile_is_kept(capsys, photos, monkeypatch):
    real = cleaned_folder.shutil.copy2

    def meanwhile(old, new):
        Path("clean").mkdir(exist_ok=True)
        Path("clean/mine.txt").write_text("mine")
        return real(old, new)

    monkeypatch.setattr(cleaned_folder.shutil, "copy2", meanwhile)
    assert run(capsys, "--cleaned-folder", "clean")[0] != 0
    assert content("clean") == {"mine.txt": b"mine"}
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


class TestPlaces:
    def test_images_that_stay_keep_their_names(self):
        paths, classes = ["1.png"] * 3, ["dog", "dog", "dog"]
        places = assign_paths(paths, classes, ["cat", "eel", "dog"])
        assert places == ["dog/1-from-cat.png", "dog/1-from-eel.png", "dog/1.png"]

    def test_new_names_may_be_taken_too(self):
        paths = ["1.png", "1.png", "1-from-cat.png"]
        places = assign_paths(paths, ["dog"] * 3, ["cat", "dog", "dog"])
        assert places == ["dog/1-from-cat-2.png", "dog/1.png", "dog/1-from-cat.png"]

    def test_case_and_composition_count_as_the_same(self):
        assert assign_paths(["A.png", "a.png"], ["x", "x"], ["y", "x"]) == [
            "x/A-from-y.png",
            "x/a.png",
        ]
        composed, decomposed = "\u00e9.png", "e\u0301.png"
        places = assign_paths([composed, decomposed], ["x", "x"], [None, None])
        assert places == [f"x/{composed}", "x/e\u0301-1.png"]

    def test_every_place_is_used_once(self):
        rng = np.random.default_rng(0)
        paths = [f"{i}.png" for i in rng.integers(0, 5, 300)]
        names = np.array(["a", "b", "c"])
        origins, classes = names[rng.integers(0, 3, 300)], names[rng.integers(0, 3, 300)]
        places = assign_paths(paths, classes.tolist(), origins.tolist())
        assert len(set(places)) == 300
        assert all(place.startswith(f"{k}/") for place, k in zip(places, classes, strict=True))
