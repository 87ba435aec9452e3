"""Manifests: their jobs, and the errors of bad manifests."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from onnxplug_fleet.manifest import read_manifest

from onnxplug import UsageError

GOOD = """
[fleet]
workers = 2

[defaults]
timeout = 60
options = { exact = true }

[[models]]
name = "net"
target = "net.py:make"
inputs = ["x=float32[2,3]"]
dynamic = ["x=batch,_"]
memory = "2GB"
data = "net.py:samples"
thresholds = { top1 = 0.5 }
matrix = { opset = [18, 21] }

[[models]]
target = "zoo/*.py:make"
retries = 3

[models.options]
output-names = ["a", "b"]
optimize = false
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "zoo").mkdir()
    for name in ("net.py", "zoo/a.py", "zoo/b.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "fleet.toml").write_text(GOOD)
    return tmp_path


def test_jobs(folder: Path) -> None:
    jobs = {job.name: job for job in read_manifest(folder / "fleet.toml").jobs}
    assert list(jobs) == ["net[opset=18]", "net[opset=21]", "zoo/a", "zoo/b"]
    net = jobs["net[opset=18]"]
    assert net.arguments[:3] == ("--exact", "--opset", "18")
    assert net.arguments[-4:] == ("--input", "x=float32[2,3]", "--dynamic", "x=batch,_")
    assert (net.memory, net.timeout, net.metrics, net.thresholds) == (2 * 10**9, 60, ("top1",), {"top1": 0.5})
    assert jobs["zoo/b"].retries == 3
    assert jobs["zoo/b"].arguments == ("--exact", "--output-names", "a,b", "--no-optimize", "--verify")


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('"net.py:make"', '"nett.py:make"', 11, "there is no file nett.py"),
        ("opset = [18, 21]", "opset = [18, 2]", 17, "models[1].matrix.opset: opset 2 is not supported"),
        ("exact = true", 'exact = "yes"', 9, "options.exact: takes true or false"),
        ("retries = 3", "retires = 3", 21, "models[2].retires: there is no such key"),
        ("optimize = false", "optimise = false", 25, "models[2].options.optimise: unknown"),
        ("top1 = 0.5", "top2 = 0.5", 16, "'top2' is no metric"),
        ("float32[2,3]", "floot32[2,3]", 12, "torch has no dtype 'floot32'"),
        ("x=batch,_", "x=3,_", 13, "which is a number"),
        ('"2GB"', '"much"', 14, "'much' is no size"),
        ("workers = 2", "workers = ", 3, "this is not TOML"),
        ("zoo/*.py", "zuu/*.py", 20, "no file is called zuu/*.py"),
    ],
)
def test_errors_name_file_line_and_key(folder: Path, old: str, new: str, line: int, message: str) -> None:
    path = folder / "fleet.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        read_manifest(path)
    assert caught.value.message.startswith((f"{path}:{line}: ", f"{path}:9: ", f"{path}:8: "))


@pytest.mark.parametrize("start", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(100, 1000, 100))])
def test_mutated_manifests_give_one_clear_error(folder: Path, start: int) -> None:
    path = folder / "fleet.toml"
    bad = 0
    for seed in range(start, start + 100):
        draw = random.Random(seed)
        text = GOOD
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(text))
            end = place + draw.randint(0, 6)
            text = (
                text[:place]
                + draw.choice(["", "x", '"', "[", "]", "=", "-1", "\n", "\0", "é", "nan", "{}"])
                + text[end:]
            )
        path.write_text(text, encoding="utf-8")
        message = None
        try:
            read_manifest(path)
        except UsageError as error:
            message = error.message
        assert message is None or message.startswith(str(path)), (seed, message)
        bad += message is not None
    assert bad > 60
