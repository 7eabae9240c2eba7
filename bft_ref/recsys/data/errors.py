"""Named errors for data files: each says which file and which line."""

from bft_ref.training.files import DataError


class DuplicateError(DataError):
    """A user or an interaction that was already given."""


class EmptyUserError(DataError):
    """A user without a single interaction."""


class ItemRangeError(DataError):
    """An item id outside the range that the format or the caller allows."""
