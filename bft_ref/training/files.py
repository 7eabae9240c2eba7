"""Files that are whole or not there, of one's own and of the public's."""

import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pooch


class DataError(ValueError):
    """A data file says something that cannot be used as it stands."""

    def __init__(self, path: str | Path, line: int | None, message: str):
        self.path, self.line = str(path), line
        where = self.path if line is None else f"{self.path}, line {line}"
        super().__init__(f"{where}: {message}")


class MalformedLineError(DataError):
    """A line that does not follow the format."""


class DataUnavailableError(RuntimeError):
    """A file that is neither in the local folder nor downloadable."""


@dataclass(frozen=True)
class PublicFile:
    """Where a file lies, and its checksum.

    ``archive`` is the checksum of the file at ``url`` when the wanted one is
    a ``member`` of it.
    """

    file: str
    url: str
    sha256: str
    archive: str = field(default="", kw_only=True)
    member: str = field(default="", kw_only=True)


def fetch(
    name: str, data: PublicFile, folder: str | Path | None = None
) -> Path:
    """The checked local path of a public file, downloaded if need be.

    Looks below ``folder`` (default: the environment variable BFT_DATA), then
    in the download cache, then at the public address; ``name`` is what
    messages call it.
    Raises: ValueError for a file with another checksum; DataUnavailableError
    if the file is not there and cannot be downloaded.
    """
    folder = folder or os.environ.get("BFT_DATA")
    if folder is not None:
        if not Path(folder).is_dir():
            raise DataUnavailableError(
                f"{folder}: expected a folder with data"
            )
        others = []
        for path in sorted(Path(folder).rglob(data.file)):
            found = pooch.file_hash(str(path), alg="sha256")
            if found == data.sha256:
                return path
            others.append(f"{path}: {found}")
        if others:
            raise ValueError(
                f"{name}: expected sha256 {data.sha256}, got another version "
                f"of the file ({', '.join(others)})"
            )
    try:
        paths = pooch.retrieve(
            data.url,
            known_hash=f"sha256:{data.archive or data.sha256}",
            path=pooch.os_cache("bft_ref"),
            processor=pooch.Unzip([data.member]) if data.member else None,
        )
    except (OSError, ValueError) as error:
        where = f"below {folder}" if folder else "in a folder set by BFT_DATA"
        raise DataUnavailableError(
            f"{name}: {data.file} is not {where} and could not be downloaded "
            f"from {data.url} ({type(error).__name__}: {error}). Put the file "
            "into a folder and set BFT_DATA to it, or go online."
        ) from error
    return Path(paths[0] if isinstance(paths, list) else paths)


def _open(path: Path, **how) -> IO:
    return (gzip.open if path.suffix == ".gz" else open)(path, **how)


@contextmanager
def text_file(path: Path) -> Iterator[IO[str]]:
    """Text lines of a plain or gzipped UTF-8 file.

    Raises: MalformedLineError for bytes that are no UTF-8 or no gzip.
    """
    try:
        with _open(path, mode="rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise MalformedLineError(
            path, _first_undecodable(path), f"not UTF-8: {error.reason}"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise MalformedLineError(path, None, f"not gzip: {error}") from None


def _first_undecodable(path: Path) -> int | None:
    with _open(path, mode="rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write to, which takes the place of ``path`` in the end.

    A failure leaves what was there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    try:
        yield unfinished
        # Renaming is atomic: a kill leaves the old file or the new one.
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(content: Any, path: Path | None) -> None:
    """Write JSON for people to read, to a file or, for None, to stdout."""
    text = json.dumps(content, indent=1)
    # One line for a list of numbers: thousands of lines help nobody.
    text = re.sub(
        r"\[[\s\d,.e+-]+\]", lambda m: re.sub(r"\s+", " ", m[0]), text
    )
    if path is None:
        sys.stdout.write(text + "\n")
        return
    with replacing(path) as unfinished:
        unfinished.write_text(text + "\n")
