"""What the documents say about the project must be so; their Python blocks run by themselves."""

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import neuvar

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MODULES = (
    "baselines", "bounds", "cleaning", "continual", "data", "labels", "measures", "models", "optim",
    "train",
)  # fmt: skip
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    ("page", "sources"),
    [
        ("cleaning", ("cleaning", "cleaning_scale", "judgement", "judgement_files")),
        ("which-b", ("auto",)),
    ],
)
def test_tables_are_those_of_the_benchmarks(page, sources):
    rows = [line for line in lines_of(f"docs/{page}.md") if line.startswith("|")]
    assert len(rows) > 3
    assert set(rows) <= {line for source in sources for line in lines_of(f"results/{source}.md")}


def lines_of(path: str) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_names_the_two_commands(command):
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_make_commands_exist(document):
    text = document.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.M)) <= TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_to_files_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_python_blocks_of_every_document_are_run():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "README.md", "docs"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    for document in DOCUMENTS:
        if "```python" in document.read_text(encoding="utf-8"):
            assert name_of(document) in done.stdout


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == project["version"]


def test_core_needs_torch_and_numpy_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}
    assert names == {"numpy", "torch"}


def test_constraints_are_exact():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert "torch==2.13.0" in pins


API = sorted((ROOT / "docs" / "api").glob("*.md"))


def described() -> list[str]:
    """What the pages of the API describe."""
    return [
        line.removeprefix("::: ")
        for page in API
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith(":::")
    ]


def test_every_public_name_has_its_place_in_the_api():
    assert set(neuvar.__all__) <= {path.rpartition(".")[2] for path in described()}


def test_names_in_the_api_exist_and_are_described_once():
    found = [pkgutil.resolve_name(path) for path in described()]
    assert len(set(map(id, found))) == len(found)


@pytest.mark.parametrize("name", MODULES)
def test_every_function_and_class_of_a_public_module_is_in_the_api(name):
    module = importlib.import_module(f"neuvar.{name}")
    public = {id(thing): key for key in module.__all__ if callable(thing := getattr(module, key))}
    for path in described():
        public.pop(id(pkgutil.resolve_name(path)), None)
    assert public == {}


def test_every_page_of_the_api_is_in_the_navigation_and_in_the_overview():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    overview = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for page in API:
        assert f": api/{page.name}\n" in navigation
        assert f"(api/{page.name})" in overview


def test_tables_are_those_of_the_results():
    spec = importlib.util.spec_from_file_location("write_tables", ROOT / "tools/write_tables.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    used = set()
    for path in tool.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"<!-- table (\w+) -->", text))
        assert tool.filled(text) == text, f"{path.name} is out of date: run make report"
    assert used == set(tool.TABLES)


def test_the_guide_shows_the_example_experiment():
    code = (ROOT / "examples/my_experiment.py").read_text(encoding="utf-8")
    code = code[code.index("import math") :]
    assert code in (ROOT / "docs/add-your-own.md").read_text(encoding="utf-8")
