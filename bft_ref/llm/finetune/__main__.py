"""Command line: ``python -m bft_ref.llm.finetune --help``."""

import sys

from bft_ref.llm.finetune.command import execute, parse

if __name__ == "__main__":
    try:
        execute(parse(sys.argv[1:]))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
