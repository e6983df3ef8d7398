"""Python blocks of the README and the documents run as tests, with one namespace a document.

Processes that share the tests get the files with slow ones first, so that they end together. Tests,
modules and pages about a framework that is not installed are left out.
"""

import gc
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parent
FRAMEWORKS = {
    "accelerate": "accelerate",
    "fastai": "fastai",
    "huggingface": "transformers",
    "lightning": "lightning",
    "loggers": "lightning",
    "peft": "peft",
    "skorch": "skorch",
    "ray_train": "pydantic",
}
"""The package that the test, the module and the page of this name need.

Ray is in the dev extra, but Ray Train also needs pydantic.
"""

REGISTRIES = {
    "neuvar.continual": ("PENALTIES", "STREAMS"),
    "neuvar.data": ("LOADERS",),
    "neuvar.experiments": ("EXPERIMENTS",),
    "neuvar.labels": ("KINDS",),
    "neuvar.models": ("NETWORKS",),
    "neuvar.noise": ("FAMILIES",),
    "neuvar.train": ("OPTIMIZERS",),
}
"""Dicts to which documents and examples add their own, by module."""


def framework_of(path: Path) -> str | None:
    """The package that a file needs, beside those of the dev extra."""
    folders = ROOT / "docs", ROOT / "tests/integrations", ROOT / "src/neuvar/integrations"
    if path.parent not in folders:
        return None
    return FRAMEWORKS.get(path.stem.removeprefix("test_").replace("-", "_"))


def is_missing(framework: str | None) -> bool:
    return framework is not None and find_spec(framework) is None


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/*.md"]
).pytest()


def pytest_report_header():
    missing = sorted({name for name in FRAMEWORKS.values() if is_missing(name)})
    return f"left out, not installed: {', '.join(missing)}" if missing else None


def pytest_ignore_collect(collection_path, config):
    """Leave out code that needs a missing framework, or one that is not wanted.

    Its import would fail, or take seconds.
    """
    framework = framework_of(collection_path) if collection_path.suffix == ".py" else None
    unwanted = config.option.markexpr == "not integrations"
    return True if framework and (unwanted or is_missing(framework)) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect without the garbage collector, which would visit thousands of tests many times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    for item in items:
        if framework := framework_of(item.path):
            item.add_marker(pytest.mark.integrations)
            if framework == "pydantic":  # Ray Data warns of options that Ray Train sets
                item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            elif item.path.suffix == ".md":  # frameworks warn of what is not ours
                item.add_marker(pytest.mark.filterwarnings("default"))
            if is_missing(framework):
                item.add_marker(pytest.mark.skip(reason=f"{framework} is not installed"))
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


@cache
def registries():
    """Each registry, and a copy of what it had before the first test."""
    found = [
        getattr(import_module(module), name)
        for module, names in REGISTRIES.items()
        for name in names
    ]
    return [(registry, dict(registry)) for registry in found]


def pytest_runtest_setup():
    registries()


def pytest_runtest_teardown(item, nextitem):
    """What a file has added to the registries ends with it."""
    if nextitem is None or nextitem.path != item.path:
        for registry, before in registries():
            registry.clear()
            registry.update(before)
