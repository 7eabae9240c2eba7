"""What the README and the front matter say is what the package does."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bft_ref
from tests.book import links
from tests.example import examples


def code_of(page: Path) -> str:
    """The one block of Python on a page."""
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text("utf8"), re.S)
    return block


def test_the_example_of_the_readme_runs(root: Path, tmp_path: Path):
    block = code_of(root / "README.md")
    assert len([line for line in block.splitlines() if line]) <= 10
    done = subprocess.run(
        [sys.executable, "-W", "error", root / "tests" / "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"what the last token believes: \(64,\)\n"
        r"mean gain, layer by layer: \['0\.\d\d', '0\.\d\d'\]\n",
        done.stdout,
    )


def test_the_quick_starts_run(root: Path, tmp_path: Path):
    page = root / "book" / "pages" / "how-to.md"
    blocks = examples(page)
    lengths = [len(b.replace("\n\n", "\n").splitlines()) for b in blocks]
    assert len(lengths) == 4 and max(lengths[:3]) <= 11 and lengths[3] <= 20
    done = subprocess.run(
        [sys.executable, "-W", "error", root / "tests" / "example.py", page],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    layer, encoder, drop_in, *shop = done.stdout.splitlines()
    assert "[2, 4, 10]" in layer and "[2, 10, 1]" in layer
    assert float(encoder.split()[-1]) < 1e-5
    assert 0 < float(drop_in.split()[-1]) < 0.1
    # customer 7 had sku 9 to 17; a stranger gets what most have
    _, *rows, left_out = [re.split(r"\s{2,}", line) for line in shop]
    known, stranger, history = rows[::3]
    assert known[1:5] == ["0", "customer 7", "1", "18"]
    assert stranger[2] == "a stranger" and stranger[-1] == "popularity"
    assert history[1] == "2" and history[3:5] == ["1", "5"]
    assert known[-1] == history[-1] == "model" and left_out == [
        "left out: 4711"
    ]


def test_one_layer_on_one_page_is_the_layer(root: Path):
    page = {}
    exec(code_of(root / "book" / "pages" / "one-layer.md"), page)
    torch.manual_seed(0)
    d, T, width = 6, 5, 10
    ours = bft_ref.BFTLayer(
        d,
        nhead=1,
        dim_feedforward=width,
        dropout=0.0,
        norm_first=True,
        bias=False,
        dtype=torch.float64,
        config=bft_ref.BFTConfig(prior_dof=1.7),
    ).eval()
    with torch.no_grad():
        ours.log_process_noise.normal_()
    h = torch.randn(T, d, dtype=torch.float64) * 2.5
    log_precision = torch.randn(T, d, dtype=torch.float64)
    belief = ours(bft_ref.Belief(h[None], log_precision[None]), is_causal=True)
    mean, log = page["layer"](
        h,
        log_precision,
        *ours.self_attn.in_proj_weight.chunk(3),
        ours.self_attn.out_proj.weight,
        ours.linear1.weight,
        ours.linear2.weight,
        ours.log_process_noise.exp(),
        dof=1.7,
    )
    torch.testing.assert_close(mean, belief.mean[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        log, belief.log_precision[0], rtol=1e-10, atol=1e-10
    )


def test_from_torch_is_what_the_readme_promises():
    plain = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
    )
    assert isinstance(bft_ref.BFTEncoder.from_torch(plain), bft_ref.BFTEncoder)


def test_every_public_name_is_in_the_reference_once(site: Path, root: Path):
    names = [
        tag["id"]
        for path in sorted((site / "book" / "pages").glob("api*.html"))
        for tag in links.read(path).select("dt[id^=bft_ref]")
    ]
    assert len(names) == len(set(names))
    public = [
        ".".join(path.relative_to(root).with_suffix("").parts) + "." + name
        for path in root.glob("bft_ref/**/*.py")
        if not re.search(r"/_[^/]*$", path.as_posix())
        for name in re.findall(
            r'(?m)^(?:class|def) ([A-Za-z]\w*)\b(?:[^"]*?:\n) +"""',
            path.read_text("utf8"),
        )
    ]
    assert set(bft_ref.__all__) <= {name.split(".")[-1] for name in names}
    assert not {*public} - {*names}


def test_the_reference_is_in_the_order_of_the_layer(site: Path):
    page = links.read(site / "book" / "pages" / "api-core.html")
    modules = [tag.contents[0] for tag in page.select("article h2")]
    steps = ["layer", "encoder", "belief", "kriging", "reml", "kalman"]
    assert modules[:7] == [f"bft_ref.{name}" for name in [*steps, "delta"]]
    for path in (site / "book" / "pages").glob("api*.html"):
        apart = path.stem == "api-notebook"
        ids = [tag["id"] for tag in links.read(path).select("dt[id]")]
        mine = r"bft_ref\.(notebook|textbook)\."
        assert {bool(re.match(mine, one)) for one in ids} <= {apart}, path


def test_every_notation_is_a_name_of_the_notation_table(root: Path):
    table = (root / "book" / "pages" / "notation.md").read_text("utf8")
    for name in bft_ref.Belief._fields:
        assert f"`{name}`" in table


def test_prerequisites_have_the_minutes_of_each_chapter(root: Path):
    rows = re.findall(
        r"(?m)^\| (\d+) \| (.*?) \|.*\| (\d+) \|$",
        (root / "book" / "pages" / "prerequisites.md").read_text("utf8"),
    )
    chapters = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    assert len(rows) == len(chapters)
    for (number, _, minutes), path in zip(rows, chapters, strict=True):
        assert int(number) == int(path.name[:2])
        heading = r"### Exercise [\d.]+ \((\d+) minutes"
        found = re.findall(heading, path.read_text("utf8"))
        assert int(minutes) == sum(map(int, found)), number


def test_every_reference_has_a_doi_or_is_a_book(root: Path):
    text = (root / "book" / "references.bib").read_text("utf8")
    entries = re.split(r"(?m)^@", text)[1:]
    assert len(entries) > 20
    for entry in entries:
        assert "doi" in entry or entry.startswith("book{kish1965")


def test_one_layer_prints_on_one_page(site: Path, tmp_path: Path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        assert "CI" not in os.environ, "Chromium is missing"
        pytest.skip("Chromium is missing: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        page.goto((site / "book" / "pages" / "one-layer.html").as_uri())
        page.wait_for_selector("mjx-container")
        page.wait_for_function("MathJax.startup.promise.then(() => true)")
        margin = dict.fromkeys(["top", "bottom", "left", "right"], "12mm")
        printed = page.pdf(format="A4", margin=margin)
        browser.close()
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", printed)) == 1
