"""Read CSV and Parquet files, with errors that name the file, the row and the column."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from neuvar.cleaning.class_indices import NUMBERS
from neuvar.cleaning.posterior import Array
from neuvar.labels.label_files import first_line

NEEDS_PANDAS = 'reading tables needs pandas and pyarrow: pip install "neuvar[clean]"'
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of cells that spreadsheets run as formulas."""
UNNAMED = ("", "Unnamed: 0")
"""Names of a first column of row numbers, as pandas and R write them."""

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


def read_header(path: Path) -> tuple[list[str], list[str]]:
    """All columns of a table, and those that are row numbers of pandas or R."""
    indexes = {"__index_level_0__"}
    if _is_parquet(path):
        schema = _read_parquet(path, lambda file: file.schema_arrow)
        names = list(schema.names)
        with suppress(ValueError, AttributeError, TypeError):  # the metadata may be anything
            indexes.update(n for n in schema.pandas_metadata["index_columns"] if isinstance(n, str))
    else:
        options = {"header": None, "nrows": 1, "dtype": object}
        frame = _read_csv(path, encoding_errors="surrogateescape", **options)
        names = frame.iloc[0].tolist()
    indexes.update(name for name in names[:1] if name in UNNAMED)
    if len(set(names)) < len(names):
        repeated = min(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path} must name each column once, but {repeated!r} occurs twice")
    return names, [name for name in names if name in indexes]


def check_column(name: str, names: Sequence[str], path: Path) -> None:
    """Refuse a column that a table does not have."""
    if name not in names:
        listed = ", ".join(map(repr, names[:12]))
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        hint = "; separate the columns by commas" if len(names) == 1 and ";" in names[0] else ""
        raise ValueError(f"{path} has no column {name!r}; its columns are {listed}{more}{hint}")


def read_frame(path: Path, columns: Sequence[str], label: str | None) -> tuple[Any, list[Any]]:
    """A data frame, and its column of labels. Labels of a CSV file stay text."""
    if _is_parquet(path):
        whole = _read_parquet(path, lambda file: file.read())
        frame = whole.replace_schema_metadata().to_pandas()
    else:
        names, _ = read_header(path)
        text = {name: object for name in names if name not in columns}
        frame = _read_csv(path, header=0, names=names, dtype=text)
    if not len(frame):
        raise ValueError(f"{path} has no rows")
    if not columns:
        raise ValueError(f"{path} must have columns besides the labels")
    if label is None:
        return frame, []
    _refuse_empty(frame[label], path)
    labels = frame[label].tolist()
    numeric = np.asarray(frame[label]).dtype.kind in NUMBERS
    if not numeric and not all(isinstance(one, str) for one in labels):
        raise ValueError(f"{path}: column {label!r} must hold labels, got {frame[label].dtype}")
    return frame, labels


def read_numbers(path: Path, columns: Sequence[str]) -> Array:
    """Columns of numbers as float32."""
    frame, _ = read_frame(path, columns, None)
    numbers = np.empty((len(frame), len(columns)), np.float32)
    for j, name in enumerate(columns):
        with np.errstate(over="ignore"):
            numbers[:, j] = _numbers(frame[name], path)
        if not np.isfinite(numbers[:, j]).all():
            row = int(np.isinf(numbers[:, j]).argmax())
            raise ValueError(f"{path}: example {row}, column {name!r} is too large for float32")
    return numbers


def replace_column(path: Path, column: str, values: Sequence[str | None]) -> str:
    """The text of a CSV file after replacing cells of one column; None keeps a cell."""
    text, new_cells = io.StringIO(), iter(values)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        writer = csv.writer(text, lineterminator="\n")
        position = None
        for cells in reader:
            if not "".join(cells).strip() and not cells[1:]:
                continue  # an empty line is not a row
            if position is None:
                position = cells.index(column)
            else:
                new = next(new_cells)
                cells[position] = cells[position] if new is None else new
            writer.writerow(cells)
    return text.getvalue()


def read_texts(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Some columns of a CSV file as text, with :func:`escape_cell` undone.

    File names need not be valid UTF-8; their bytes are kept by ``surrogateescape``.
    """
    names, _ = read_header(path)
    options = {"dtype": object, "encoding_errors": "surrogateescape"}
    frame = _read_csv(path, header=0, names=names, **options)
    for name in columns:
        check_column(name, names, path)
        _refuse_empty(frame[name], path)
    rows = zip(*(map(unescape_cell, frame[name].tolist()) for name in columns), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _read_csv(path: Path, **options: Any) -> Any:
    """Read a CSV file as a data frame; empty cells become empty text."""
    try:
        import pandas as pd  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(NEEDS_PANDAS) from error
    options |= {"na_filter": False, "low_memory": False, "index_col": False}
    try:
        # pandas could take a path for a URL.
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(file, encoding="utf-8-sig", **options)
    except UnicodeError as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{path} must begin with a line of column names, it is empty") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} is not a CSV file: {' '.join(str(error).split())}") from error


def _read_parquet(path: Path, read: Callable[[Any], Any]) -> Any:
    """The result of ``read`` with a ``pyarrow.parquet.ParquetFile``."""
    try:
        import pyarrow as arrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(NEEDS_PANDAS) from error
    try:
        with path.open("rb") as file:  # pyarrow could take a path for a URL
            return read(parquet.ParquetFile(file))
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {first_line(error)}") from error


def _numbers(column: Any, path: Path) -> Array:
    """Finite numbers in float64, from a column of numbers, booleans or, in a CSV file, text."""
    import pandas as pd

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
            f"{path}: {row_location(path, row)}, column {column.name!r} must be a finite number, "
            f"got {cells.tolist()[row]!r}"
        )
    return numbers


def _refuse_empty(column: Any, path: Path) -> None:
    for row, cell in zip(column.index, column.tolist(), strict=True):
        if cell is None or cell != cell or (isinstance(cell, str) and not cell.strip()):
            where = row_location(path, row)
            why = _missing_fields(path, row)
            raise ValueError(f"{path}: {where}, column {column.name!r} is empty{why}")


def _missing_fields(path: Path, row: int) -> str:
    """How many fields a row of a CSV file has, if it has too few."""
    if _is_parquet(path):
        return ""
    with suppress(csv.Error), path.open(encoding="utf-8-sig", errors="replace") as file:
        rows = (cells for cells in csv.reader(file) if "".join(cells).strip() or cells[1:])
        head, cells = next(rows), next(islice(rows, row, None), None)
        if cells is not None and len(cells) < len(head):
            return f": the line has {len(cells)} of {len(head)} fields"
    return ""


def row_location(path: Path, row: int) -> str:
    """The line of a row in a CSV file, otherwise its number; pandas does not keep lines."""
    if not _is_parquet(path):
        with suppress(csv.Error), path.open(encoding="utf-8-sig", errors="replace") as file:
            reader = csv.reader(file)
            lines = (reader.line_num for cells in reader if "".join(cells).strip() or cells[1:])
            return f"line {next(islice(lines, row + 1, None))}"
    return f"row {row}"


def csv_bytes(rows: Iterable[Sequence[Any]]) -> bytes:
    """A CSV file without formulas. File names keep the bytes that are not valid UTF-8."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([escape_cell(str(cell)) for cell in row] for row in rows)
    return text.getvalue().encode(errors="surrogateescape")


def escape_cell(cell: str) -> str:
    """Put an apostrophe before a cell that a spreadsheet would run as a formula.

    Numbers are not changed. A cell that looks escaped already gets one more apostrophe.

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
