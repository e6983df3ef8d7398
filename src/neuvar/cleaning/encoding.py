"""Encode the columns of a table as numbers: missing values, dates, categories and text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from neuvar.cleaning.posterior import Array
from neuvar.cleaning.tables import read_frame, row_location

MISSING = frozenset(("", "nan", "na", "n/a", "null", "none", "?"))
"""Cells that count as empty, in lower case."""
NUMBERS_WITH_TYPOS = 0.9
"""With at least this share of numbers, a column is numeric; its other cells are typing errors."""
MAX_CATEGORIES = 50
"""Largest number of categories of a column; its rarer values share the last one."""
FEW_VALUES = 20
"""A column with at most this many values, or at least five rows per value, is categorical."""
ROWS_TO_COUNT = 20
"""In a table with at least this many rows, a column that counts the rows is left out."""
TEXT_WORDS = 2.5
"""Smallest mean number of words per cell in a column of text."""
TEXT_FEATURES = 300
"""Number of features per column of text."""
NEVER_REPEATS = "too many different values"
COUNTS_ROWS = "it counts the rows"
LEFT_OUT = (NEVER_REPEATS, COUNTS_ROWS)
"""Reasons to leave a column out."""
NEEDS_SKLEARN = (
    "tables with missing values, dates, categories or text need scikit-learn: "
    'pip install "neuvar[clean]"'
)


@dataclass(frozen=True, eq=False)
class Features:
    """Columns of a table as numbers.

    Attributes:
        numbers: float32, shape (rows, features).
        columns: columns that were used.
        cells: text of each cell, by column; empty if all columns are plain numbers.
        summary: how the columns were encoded; empty if all columns are plain numbers.
        left_out: columns that were not used, each with the reason.
        from_text: whether each feature is from a column of text; empty if there is none.
    """

    numbers: Array
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...] = ()
    summary: str = ""
    left_out: tuple[str, ...] = ()
    from_text: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class _Column:
    name: str
    kind: str  # "number", "date", "category", "text", or one of LEFT_OUT
    values: Array  # float64 with nan for missing values, or text
    series: Any  # as it was read

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells as text."""
        return tuple(map(_cell, self.series.tolist()))

    @property
    def missing(self) -> int:
        """Number of missing values."""
        return int(np.isnan(self.values).sum()) if self.kind in ("number", "date") else 0


def read_features(
    path: Path, columns: Sequence[str], label: str | None
) -> tuple[Features, list[Any]]:
    """The columns of a table as numbers, and the column of labels.

    An error names all columns with problems.
    """
    frame, labels = read_frame(path, columns, label)
    read = [_read_column(frame[name]) for name in columns]
    problems = list(filter(None, (_problem(column, path) for column in read)))
    if problems:
        if len(problems) > 1:
            listed = "".join(f"\n  {problem}" for problem in problems)
            raise ValueError(f"{path} has {len(problems)} columns with problems:{listed}")
        raise ValueError(f"{path}: {problems[0]}")
    return _encode(read, path), labels


def _read_column(series: Any) -> _Column:
    import pandas as pd  # type: ignore[import-untyped]

    name, n = series.name, len(series)
    if series.dtype.kind in "biuf":
        values = np.asarray(series.to_numpy(dtype=np.float64, na_value=np.nan))
        # In a table sorted by its labels, row numbers reveal them.
        counts = n >= ROWS_TO_COUNT and bool((np.diff(values) == 1).all())
        return _Column(name, COUNTS_ROWS if counts else "number", values, series)
    clean = ["" if text.lower() in MISSING else text for text in map(_cell, series.tolist())]
    known = np.array([bool(text) for text in clean])
    text = pd.Series(clean, dtype=object)
    numbers = np.asarray(pd.to_numeric(text.where(known), errors="coerce"), np.float64)
    share = np.isfinite(numbers[known]).mean() if known.any() else 1.0
    if share >= NUMBERS_WITH_TYPOS:
        return _Column(name, "number", numbers, series)
    days = _days(text[known])
    if days is not None:
        values = np.full(n, np.nan)
        values[known] = days
        return _Column(name, "date", values, series)
    kind, filled = "category", text[known]
    if filled.nunique() > max(FEW_VALUES, n / 5):
        kind = "text" if filled.str.split().str.len().mean() >= TEXT_WORDS else NEVER_REPEATS
    return _Column(name, kind, np.array(clean, dtype=object), series)


def _days(texts: Any) -> Array | None:
    """Days since 1970 if all texts are dates such as 2024-05-31, otherwise None."""
    import pandas as pd

    if not texts.str.match(r"\d{4}-\d{1,2}(-\d{1,2})?\b").all():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dates = pd.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
    if dates.isna().any():
        return None
    since = (dates - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
    return np.asarray(since, np.float64)


def _cell(value: Any) -> str:
    """A cell as text; empty for a missing value."""
    if value is None or value != value:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value).strip()


def _problem(column: _Column, path: Path) -> str:
    """An error message for a column, or an empty text."""
    series = column.series
    if column.kind == COUNTS_ROWS:
        return ""
    if column.kind != "number":
        binary = any("\0" in str(value) for value in series)
        return f"column {column.name!r} must be text, it has NUL characters" if binary else ""
    bad = np.abs(column.values) > np.finfo(np.float32).max
    if series.dtype.kind not in "biuf":
        nan = np.flatnonzero(np.isnan(column.values))
        cells = series.iloc[nan].tolist()
        bad[nan] = [_cell(value).lower() not in MISSING for value in cells]
    if not bad.any():
        return ""
    row = int(bad.argmax())
    value = series.iloc[row]
    value = value.item() if isinstance(value, np.generic) else value  # no "np.float64(inf)"
    more = f", and {bad.sum() - 1} more" if bad.sum() > 1 else ""
    return (
        f"{row_location(path, row)}, column {column.name!r} must be a finite number for float32, "
        f"got {value!r}{more}; correct it, or leave the column out with --drop"
    )


def _encode(columns: list[_Column], path: Path) -> Features:
    if len(columns) == 1 and columns[0].kind == COUNTS_ROWS:
        columns = [replace(columns[0], kind="number")]
    used = [column for column in columns if column.kind not in LEFT_OUT]
    left_out = tuple(
        f"column {column.name!r} ({column.kind})" for column in columns if column.kind in LEFT_OUT
    )
    if not used:
        raise ValueError(f"{path} has no column to train on: {', '.join(left_out)}")
    names = tuple(column.name for column in used)
    if all(column.kind == "number" and not column.missing for column in used):
        numbers = np.stack([column.values for column in used], 1).astype(np.float32)
        return Features(numbers, names, left_out=left_out)
    parts = [_encode_column(column) for column in used]
    numbers = np.concatenate(parts, 1).astype(np.float32)
    cells = tuple(column.cells for column in used)
    kinds = [column.kind for column, part in zip(used, parts, strict=True) for _ in part[0]]
    from_text = tuple(kind == "text" for kind in kinds) if "text" in kinds else ()
    return Features(numbers, names, cells, _summary(used, parts), left_out, from_text)


def _encode_column(column: _Column) -> Array:
    try:
        from sklearn.decomposition import TruncatedSVD  # type: ignore[import-untyped]
        from sklearn.feature_extraction.text import (  # type: ignore[import-untyped]
            HashingVectorizer,
            TfidfTransformer,
        )
        from sklearn.impute import SimpleImputer  # type: ignore[import-untyped]
        from sklearn.pipeline import make_pipeline, make_union  # type: ignore[import-untyped]
        from sklearn.preprocessing import OneHotEncoder  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(NEEDS_SKLEARN) from error
    values = column.values[:, None]
    if column.kind in ("number", "date"):
        imputer = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        return np.asarray(imputer.fit_transform(values))
    if column.kind == "category":
        encoder = OneHotEncoder(max_categories=MAX_CATEGORIES, sparse_output=False)
        return np.asarray(encoder.fit_transform(values))
    hashed = make_union(
        HashingVectorizer(ngram_range=(1, 2), n_features=2**16),
        HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4), n_features=2**16),
    )
    svd = TruncatedSVD(min(TEXT_FEATURES, len(values)), random_state=0)
    encoder = make_pipeline(hashed, TfidfTransformer(), svd)
    return np.asarray(encoder.fit_transform(column.values))


def _summary(columns: list[_Column], parts: list[Array]) -> str:
    """How columns were encoded, in one sentence.

    >>> price = _Column("price", "number", np.array([1.0, np.nan]), None)
    >>> _summary([price], [np.zeros((2, 2))])
    "1 column of numbers ('price': 1 missing, filled with the median)"
    """
    names = {"number": "numbers", "date": "dates", "category": "categories", "text": "text"}
    counts = []
    for kind, word in names.items():
        some = [(c, part) for c, part in zip(columns, parts, strict=True) if c.kind == kind]
        notes = []
        for column, part in some:
            if column.missing:
                notes.append(f"{column.name!r}: {column.missing} missing, filled with the median")
            elif kind == "category":
                notes.append(f"{column.name!r}: {part.shape[1]} values")
            elif kind == "text":
                notes.append(f"{column.name!r}: n-grams of letters and words")
        if some:
            count = f"{len(some)} column{'s' * (len(some) != 1)} of {word}"
            counts.append(count + (f" ({'; '.join(notes)})" if notes else ""))
    return ", ".join(counts)
