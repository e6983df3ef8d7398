"""The error of this package."""


class DataError(ValueError):
    """A data set could not be found, read or verified; the message names the file."""
