"""Run a page's Python examples: what an installed package can do.

Without a path, the README's: ``python tests/example.py [PAGE]``.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def examples(page: Path = README) -> list[str]:
    """The page's blocks of Python."""
    return re.findall(r"```python\n(.*?)```", page.read_text("utf8"), re.S)


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else README
    for block in examples(page):
        exec(compile(block, page.name, "exec"), {})
