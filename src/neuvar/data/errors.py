"""The one error of this package."""


class DataError(ValueError):
    """Data that cannot be used or found; one sentence says which file and what was expected."""
