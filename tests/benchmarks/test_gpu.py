"""The command for a GPU: every part once, kept, and gone on with."""

import json

import pytest

from benchmarks import gpu


@pytest.mark.slow
def test_every_part_runs_where_there_is_no_gpu(tmp_path):
    assert gpu.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    found = {
        path.stem.rsplit("-", 1)[1]: json.loads(path.read_text())
        for path in tmp_path.glob("*.json")
    }
    assert found.keys() == gpu.PARTS.keys()
    tests = found["tests"]["found"]
    assert tests["passed"] and tests["tests"] >= 20
    assert [row["layer"] for row in found["layer"]["found"]["rows"]] == [
        "standard",
        *gpu.layer.VARIANTS,
    ]
    for arm in ["plain", "filter"]:
        assert found["training"]["found"][arm]["seconds"] > 0


@pytest.fixture
def parts(monkeypatch):
    """The parts, told apart by what they were asked."""
    asked = []

    def part(name, **found):
        def done(device):
            asked.append(name)
            if name in broken:
                raise KeyboardInterrupt
            return found

        return done

    broken: set[str] = set()
    made = {name: part(name) for name in ["layer", "training"]}
    made["tests"] = part("tests", passed=True)
    monkeypatch.setattr(gpu, "PARTS", made)
    return asked, broken, made


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, parts):
    asked, broken, _ = parts
    options = gpu.Options("cpu", tmp_path)
    broken.add("training")
    with pytest.raises(KeyboardInterrupt):
        gpu.run(options)
    broken.clear()
    assert gpu.run(options) == 0
    assert asked == ["layer", "training", "training", "tests"]
    assert gpu.run(options) == 0 and len(asked) == 4
    gpu.run(gpu.Options("cpu", tmp_path, again=True))
    assert len(asked) == 7


def test_other_code_does_it_again(tmp_path, parts, monkeypatch):
    asked, *_ = parts
    gpu.run(gpu.Options("cpu", tmp_path))
    monkeypatch.setattr(gpu, "code_version", lambda: {"sha256": "another"})
    gpu.run(gpu.Options("cpu", tmp_path))
    assert len(asked) == 6


def test_a_failed_test_fails_the_command(tmp_path, parts, monkeypatch):
    *_, made = parts
    made["tests"] = lambda device: {"passed": False}
    assert gpu.run(gpu.Options("cpu", tmp_path)) == 1
    assert gpu.run(gpu.Options("cpu", tmp_path)) == 1  # stored, and no less


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device here" in capsys.readouterr().err
