"""Named errors for data files: each says which file and which line."""

from pathlib import Path


class DataError(ValueError):
    """A data file says something that cannot be used as it stands."""

    def __init__(self, path: str | Path, line: int | None, message: str):
        self.path, self.line = str(path), line
        where = self.path if line is None else f"{self.path}, line {line}"
        super().__init__(f"{where}: {message}")


class MalformedLineError(DataError):
    """A line that does not follow the format."""


class DuplicateError(DataError):
    """A user or an interaction that was already given."""


class EmptyUserError(DataError):
    """A user without a single interaction."""


class ItemRangeError(DataError):
    """An item id outside the range that the format or the caller allows."""


class DataUnavailableError(RuntimeError):
    """A data set that is neither in the local folder nor downloadable."""
