"""Command line: ``python -m bft_ref.recsys.train --help``."""

import sys
from collections.abc import Sequence

from bft_ref.recsys.train.command import UsageError, execute, parse


def main(arguments: Sequence[str]) -> None:
    """Do what a command line asks for; bad options exit with status 2."""
    try:
        execute(parse(arguments))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
