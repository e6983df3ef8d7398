"""Read CSV, Parquet and numpy files, with errors that name the file, the row and the column."""

from __future__ import annotations

import csv
import re
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from neuvar.cleaning.class_labels import NUMBERS
from neuvar.cleaning.score import Array

NEEDS_PANDAS = 'reading tables needs pandas and pyarrow: pip install "neuvar[clean]"'
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of cells that spreadsheets run as formulas."""
UNNAMED = ("", "Unnamed: 0")
"""Names of a first column with the row numbers that pandas or R write."""
DAMAGED = (OSError, ValueError, EOFError, KeyError, SyntaxError, zipfile.BadZipFile, zlib.error)

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


class Table(NamedTuple):
    """Numeric columns, as float32 of shape (n, columns), and the column of labels."""

    columns: tuple[str, ...]
    numbers: Array
    labels: list[Any]


def read_table(path: Path, label: str | None, *, ignore: Collection[str] = ()) -> Table:
    """Read a CSV or Parquet file; in a CSV file, labels stay text."""
    names, _ = read_header(path)
    if label is not None:
        check_column(label, names, path)
    columns = tuple(name for name in names if name != label and name not in ignore)
    if _is_parquet(path):
        with _open_parquet(path) as (parquet, file):
            frame = parquet.read_table(file).replace_schema_metadata().to_pandas()
    else:
        text = {name: object for name in names if name == label or name in ignore}
        frame = _read_csv(path, header=0, names=names, dtype=text)
    if not len(frame):
        raise ValueError(f"{path} has no rows")
    if not columns:
        raise ValueError(f"{path} must have columns of numbers beside the labels, there are none")
    numbers = np.empty((len(frame), len(columns)), np.float32)
    for j, name in enumerate(columns):
        with np.errstate(over="ignore"):
            numbers[:, j] = _numbers(frame[name], path)
        if not np.isfinite(numbers[:, j]).all():
            row = int(np.isinf(numbers[:, j]).argmax())
            raise ValueError(f"{path}: example {row}, column {name!r} is too large for float32")
    return Table(columns, numbers, [] if label is None else _labels(frame[label], path))


def _numbers(column: Any, path: Path) -> Array:
    """Finite numbers in float64, from a column of numbers, booleans or, in a CSV file, text."""
    import pandas as pd  # type: ignore[import-untyped]

    cells = np.asarray(column)
    if cells.dtype.kind in NUMBERS:
        numbers = cells.astype(np.float64)
    elif _is_parquet(path):
        raise ValueError(f"{path}: column {column.name!r} must hold numbers, got {column.dtype}")
    else:
        numbers = np.asarray(pd.to_numeric(column, errors="coerce"), np.float64)
    finite = np.isfinite(numbers)
    if not finite.all():
        row = int(finite.argmin())
        if cells.dtype.kind not in NUMBERS:
            _refuse_empty(column[row : row + 1], path)
        raise ValueError(
            f"{path}: {_place(path, row)}, column {column.name!r} must be a finite number, "
            f"got {cells.tolist()[row]!r}"
        )
    return numbers


def _labels(column: Any, path: Path) -> list[Any]:
    _refuse_empty(column, path)
    labels: list[Any] = column.tolist()
    numeric = np.asarray(column).dtype.kind in NUMBERS
    if not numeric and not all(isinstance(label, str) for label in labels):
        raise ValueError(f"{path}: column {column.name!r} must hold labels, got {column.dtype}")
    return labels


def _refuse_empty(column: Any, path: Path) -> None:
    for row, cell in zip(column.index, column.tolist(), strict=True):
        if cell is None or cell != cell or (isinstance(cell, str) and not cell.strip()):
            raise ValueError(f"{path}: {_place(path, row)}, column {column.name!r} is empty")


def _place(path: Path, row: int) -> str:
    """Where a row is: in a CSV file by its line, which pandas does not keep."""
    if not _is_parquet(path):
        with suppress(csv.Error), path.open(encoding="utf-8-sig", errors="replace") as file:
            reader = csv.reader(file)
            lines = (reader.line_num for cells in reader if "".join(cells).strip() or cells[1:])
            return f"line {next(islice(lines, row + 1, None))}"
    return f"row {row}"


def read_texts(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Some columns of a CSV file as text, with :func:`escape_cell` undone.

    File names need not be valid text; their bytes are kept as Python keeps them in paths.
    """
    names, _ = read_header(path)
    options = {"dtype": object, "encoding_errors": "surrogateescape"}
    frame = _read_csv(path, header=0, names=names, **options)
    for name in columns:
        check_column(name, names, path)
        _refuse_empty(frame[name], path)
    rows = zip(*(map(unescape_cell, frame[name].tolist()) for name in columns), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def read_header(path: Path) -> tuple[list[str], list[str]]:
    """All columns of a CSV or Parquet file, and those with the row numbers of pandas or R."""
    if _is_parquet(path):
        with _open_parquet(path) as (parquet, file):
            schema = parquet.read_schema(file)
        names, indexes = list(schema.names), {"__index_level_0__"}
        with suppress(ValueError, AttributeError, TypeError):  # the metadata may be anything
            indexes.update(n for n in schema.pandas_metadata["index_columns"] if isinstance(n, str))
    else:
        options = {"header": None, "nrows": 1, "dtype": object}
        frame = _read_csv(path, encoding_errors="surrogateescape", **options)
        names, indexes = frame.iloc[0].tolist(), set()
    indexes.update(name for name in names[:1] if name in UNNAMED)
    if len(set(names)) < len(names):
        repeated = min(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} must name each column once, {repeated!r} is there twice")
    return names, [name for name in names if name in indexes]


def check_column(name: str, names: Sequence[str], path: Path) -> None:
    """Refuse a column that a table does not have."""
    if name not in names:
        listed = ", ".join(map(repr, names[:12]))
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        raise ValueError(f"{path} has no column {name!r}, there are {listed}{more}")


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _read_csv(path: Path, **options: Any) -> Any:
    """A data frame in which an empty cell stays empty text."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(NEEDS_PANDAS) from error
    options |= {"na_filter": False, "low_memory": False, "index_col": False}
    try:
        # A path could be taken for a URL, a file cannot.
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(file, encoding="utf-8-sig", **options)
    except UnicodeError as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{path} must begin with a line of column names, it is empty") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} is not a CSV file: {' '.join(str(error).split())}") from error


@contextmanager
def _open_parquet(path: Path) -> Iterator[tuple[Any, Any]]:
    try:
        import pyarrow as arrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(NEEDS_PANDAS) from error
    with path.open("rb") as file:  # a path could be taken for a URL
        try:
            yield parquet, file
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} is not a readable Parquet file: {_first_line(error)}"
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def escape_cell(cell: str) -> str:
    """Put an apostrophe before a cell that a spreadsheet would run as a formula.

    Numbers are kept. A cell that looks already escaped gets one more apostrophe.

    >>> escape_cell("=1+1"), escape_cell("cat"), escape_cell("-1"), escape_cell("'=1")
    ("'=1+1", 'cat', '-1', "''=1")
    """
    formula = cell.lstrip("'").startswith(FORMULA) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell


def unescape_cell(cell: str) -> str:
    """Undo :func:`escape_cell`.

    >>> unescape_cell("'=1+1"), unescape_cell("'tis")
    ('=1+1', "'tis")
    """
    escaped = cell.startswith("'") and cell.lstrip("'").startswith(FORMULA)
    return cell[1:] if escaped else cell


def array_names(path: Path) -> list[str]:
    """Names of the arrays in an .npz file."""
    with _numpy_errors(path), zipfile.ZipFile(path) as file:
        return [name.removesuffix(".npy") for name in file.namelist()]


def read_array(path: Path, name: str | None = None) -> Array:
    """The array of an .npy file, or one of an .npz file; nothing is unpickled."""
    with _numpy_errors(path), path.open("rb") as file:
        if name is None:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
        else:
            with np.load(file, allow_pickle=False) as arrays:
                array = arrays[name]
        return array


@contextmanager
def _numpy_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        kind = path.suffix.lower()
        raise ValueError(f"{path} is not a readable {kind} file: {_first_line(error)}") from error


def find_array(path: Path, wanted: Sequence[str], what: str, *, hint: str = "") -> str:
    """The first of some names that an .npz file has an array of."""
    names = array_names(path)
    for name in wanted:
        if name in names:
            return name
    raise ValueError(
        f"{path} has no {what}: looked for an array called {', '.join(wanted)}, "
        f"there are {', '.join(names) or 'none'}{hint}"
    )


def read_only_array(path: Path, wanted: Sequence[str], what: str) -> Array:
    """The array of an .npy file; of an .npz file, its only array or the first of some names."""
    if path.suffix.lower() == ".npy":
        return read_array(path)
    names = array_names(path)
    return read_array(path, names[0] if len(names) == 1 else find_array(path, wanted, what))
