"""Run the README's example: what an installed package has to be able to."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def example() -> str:
    """The README's one block of Python."""
    (block,) = re.findall(
        r"```python\n(.*?)```", README.read_text("utf8"), re.S
    )
    return block


if __name__ == "__main__":
    exec(compile(example(), "README.md", "exec"))
