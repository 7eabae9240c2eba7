"""The browser that the book is printed and tested with."""

import shutil

NAMES = ["chromium", "chromium-browser", "google-chrome", "chrome"]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find() -> str:
    """Chromium's path. Raises: FileNotFoundError where there is none."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(
        f"no browser: none of {', '.join(NAMES)} is on the path"
    )
