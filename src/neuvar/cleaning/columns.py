"""Tables with one row for each example: CSV and Parquet files."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuvar.cleaning.issues import Array

NEEDS_PYARROW = 'reading Parquet files needs pyarrow: pip install "neuvar[clean]"'
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that a spreadsheet would carry out."""

NAMELESS = ("", "Unnamed: 0")
"""What the first column is called if it is the row numbers that pandas or R have written."""

TRUTHS = {"False": "0", "false": "0", "FALSE": "0", "True": "1", "true": "1", "TRUE": "1"}
"""How pandas, JavaScript and R write truth values."""

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers and one column that is not read as numbers.

    Attributes:
        columns: what the columns of numbers are called.
        numbers: float32, one row for each example.
        labels: the other column; None if there is none.
    """

    columns: tuple[str, ...]
    numbers: Array
    labels: list[Any] | None


def read_csv(path: Path, label: str | None, *, without: Collection[str] = ()) -> Table:
    """Read a CSV file whose first line names its columns.

    Args:
        path: of the file.
        label: the column of labels, which stay text; None if all columns are numbers.
        without: columns that are not read, whatever they hold.
    """
    with _csv_rows(path) as (header, rows):
        place = None if label is None else place_of(label, header, path)
        kept = [i for i, name in enumerate(header) if i != place and name not in without]
        columns = tuple(header[i] for i in kept)
        numbers, labels, truths = array("f"), [], None
        for line, cells in rows:
            if truths is None:
                truths = [i for i in kept if cells[i] in TRUTHS]
            for i in truths:
                cells[i] = _truth(cells[i], path, line, header[i])
            if place is not None:
                labels.append(_said(cells[place], path, line, str(label)))
            numbers.extend(_numbers([cells[i] for i in kept], path, line, columns))
    return _table(path, columns, np.array(numbers), None if label is None else labels)


def read_texts(path: Path, wanted: Sequence[str]) -> list[dict[str, str]]:
    """Some columns of a CSV file as text, with the prefix of :func:`safe` taken away.

    Names of files need not be text; bytes that are none come back as Python has them in a path.
    """
    with _csv_rows(path, errors="surrogateescape") as (header, rows):
        places = {name: place_of(name, header, path) for name in wanted}
        return [
            {name: plain(_said(cells[i], path, line, name)) for name, i in places.items()}
            for line, cells in rows
        ]


def names_of_columns(path: Path) -> list[str]:
    """What the columns of a CSV or Parquet file are called."""
    if path.suffix.lower() == ".parquet":
        with _parquet(path) as (arrow, file):
            return list(arrow.parquet.read_schema(file).names)
    with _csv_rows(path, errors="surrogateescape") as (header, _):
        return header


def row_numbers(path: Path) -> list[str]:
    """Columns of a CSV or Parquet file that tell rows apart, as pandas and R write them."""
    names = names_of_columns(path)
    found = {name for name in names[:1] if name in NAMELESS}
    if path.suffix.lower() == ".parquet":
        with _parquet(path) as (arrow, file):
            found |= _indexes(arrow.parquet.read_schema(file))
    return [name for name in names if name in found]


def _indexes(schema: Any) -> set[str]:
    """What pandas says of its indexes; one that only counts is not kept as a column."""
    try:
        said = (schema.pandas_metadata or {}).get("index_columns", [])
    except (ValueError, AttributeError):  # what others have written there
        said = []
    return {name for name in [*said, "__index_level_0__"] if isinstance(name, str)}


@contextmanager
def _csv_rows(
    path: Path, errors: str = "strict"
) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """The header and the rows, with their lines, of a file that may be damaged at any place."""
    try:
        with path.open(encoding="utf-8-sig", errors=errors, newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if not header:
                raise ValueError(
                    f"{path} must begin with a line that names its columns, it is empty"
                )
            twice = {name for name in header if header.count(name) > 1}
            if twice:
                raise ValueError(
                    f"{path} must name each column once, {min(twice)!r} is there twice"
                )
            yield header, _complete(reader, path, len(header))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error.reason}") from error
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: line {reader.line_num}: {error}") from error


def _complete(reader: Any, path: Path, width: int) -> Iterator[tuple[int, list[str]]]:
    for cells in reader:
        if len(cells) == width:
            yield reader.line_num, cells
        elif cells:  # an empty line says nothing
            raise ValueError(
                f"{path}: line {reader.line_num} must have {width} cells as the header has, "
                f"got {len(cells)}"
            )


def place_of(name: str, names: Sequence[str], path: Path) -> int:
    """Where a column stands."""
    if name not in names:
        raise ValueError(f"{path} has no column {name!r}, there are {_listed(names)}")
    return list(names).index(name)


def _listed(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(str(name)) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _said(cell: str, path: Path, line: int, column: str) -> str:
    if not cell.strip():
        raise ValueError(f"{path}: line {line}, column {column!r} is empty")
    return cell


def _truth(cell: str, path: Path, line: int, column: str) -> str:
    if cell not in TRUTHS:
        raise ValueError(
            f"{path}: line {line}, column {column!r} must be true or false as in the lines before, "
            f"got {cell!r}"
        )
    return TRUTHS[cell]


def _numbers(cells: Sequence[str], path: Path, line: int, columns: Sequence[str]) -> list[float]:
    try:
        numbers = list(map(float, cells))
        if all(map(math.isfinite, numbers)):
            return numbers
    except ValueError:
        pass
    for cell, column in zip(cells, columns, strict=True):
        _said(cell, path, line, column)
        if not _is_finite(cell):
            raise ValueError(
                f"{path}: line {line}, column {column!r} must be a finite number, got {cell!r}"
            )
    raise AssertionError


def _is_finite(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def read_parquet(path: Path, label: str | None, *, without: Collection[str] = ()) -> Table:
    """Read a Parquet file; the arguments are those of :func:`read_csv`."""
    with _parquet(path) as (arrow, file):
        read = arrow.parquet.read_table(file)
    names = read.column_names
    if len(set(names)) < len(names):
        raise ValueError(f"{path} must name each column once, got {_listed(names)}")
    if label is not None:
        place_of(label, names, path)
    columns = [name for name in names if name != label and name not in without]
    for name in columns if label is None else [*columns, label]:
        _check_column(read.column(name), path, name, is_label=name == label)
    # Whole numbers of 64 bits, such as keys, have more digits than a float64, and are rounded.
    numbers = [read.column(name).cast(arrow.float64(), safe=False).to_numpy() for name in columns]
    for name, column in zip(columns, numbers, strict=True):
        bad = np.flatnonzero(~np.isfinite(column))
        if len(bad):
            raise ValueError(
                f"{path}: row {bad[0]}, column {name!r} must be a finite number, "
                f"got {column[bad[0]]}"
            )
    stacked = np.stack(numbers, 1) if numbers else np.empty((len(read), 0))
    labels = None if label is None else read.column(label).to_pylist()
    with np.errstate(over="ignore"):
        return _table(path, tuple(columns), stacked.astype(np.float32), labels)


@contextmanager
def _parquet(path: Path) -> Iterator[tuple[Any, Any]]:
    """pyarrow, and a file: it would take a path for a place in one of many stores."""
    try:
        import pyarrow as arrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(NEEDS_PYARROW) from error
    with path.open("rb") as file:
        try:
            yield arrow, file
        except (arrow.ArrowException, OSError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{path} is not a Parquet file that can be read: {first}") from error


def _check_column(column: Any, path: Path, name: str, *, is_label: bool) -> None:
    import pyarrow.types as kinds  # type: ignore[import-untyped]

    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise ValueError(f"{path}: row {row}, column {name!r} is empty")
    kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
    numeric = any(test(kind) for test in (kinds.is_integer, kinds.is_floating, kinds.is_boolean))
    text = kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)
    if not numeric and not (is_label and text):
        wanted = "labels" if is_label else "numbers"
        raise ValueError(f"{path}: column {name!r} must hold {wanted}, it holds {column.type}")


def _table(path: Path, columns: tuple[str, ...], numbers: Array, labels: list[Any] | None) -> Table:
    if labels is not None and not labels:
        raise ValueError(f"{path} has no rows")
    if not columns:
        raise ValueError(f"{path} must have columns of numbers beside the labels, there are none")
    table = numbers.reshape(-1, len(columns))
    if not len(table):
        raise ValueError(f"{path} has no rows")
    # A number of a CSV file may be finite and still too large for float32.
    bad = np.argwhere(~np.isfinite(table))
    if len(bad):
        raise ValueError(
            f"{path}: example {bad[0][0]}, column {columns[bad[0][1]]!r} is too large for float32"
        )
    return Table(columns, table, labels)


def safe(cell: str) -> str:
    """A cell of a CSV file that no spreadsheet takes for a formula.

    If it begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return, and is no number, an
    apostrophe is put before it. So it is before a cell that begins like one made safe.

    >>> safe("=1+1"), safe("cat"), safe("-1"), safe("'=1")
    ("'=1+1", 'cat', '-1', "''=1")
    """
    formula = cell.lstrip("'").startswith(FORMULA) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell


def plain(cell: str) -> str:
    """What :func:`safe` was given.

    >>> plain("'=1+1"), plain("'tis")
    ('=1+1', "'tis")
    """
    made_safe = cell.startswith("'") and cell.lstrip("'").startswith(FORMULA)
    return cell[1:] if made_safe else cell
