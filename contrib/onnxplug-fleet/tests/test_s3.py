"""A store on S3, in moto's server: by this process and by processes of their own. ``make test-fleet`` has moto and s3fs."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch
from onnxplug_fleet.executors import Here, Processes
from onnxplug_fleet.manifest import read_manifest
from onnxplug_fleet.runner import is_fine, run_fleet
from onnxplug_fleet.state import Run
from onnxplug_fleet.store import Store

from onnxplug import OnnxplugError

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed; make test-fleet installs it")
server = pytest.importorskip("moto.server", reason="moto is not installed; make test-fleet installs it")
MODEL = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4)
        self.a.load_state_dict(torch.load("net.pt"))
    def forward(self, x):
        return torch.relu(self.a(x))
def make():
    return Net(), (torch.ones(2, 4),)
"""
STORE = "s3://bucket/models"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3fs.S3FileSystem]:
    """The file system of a server with an empty bucket."""
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    moto.start()
    host, port = moto.get_host_and_port()
    variables = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**variables, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield files
    s3fs.S3FileSystem.clear_instance_cache()
    request = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(request).close()  # servers of one process share their state
    moto.stop()


def run(folder: Path, executor: Here | Processes, store: str = STORE) -> Run:
    return run_fleet(read_manifest(folder / "fleet.toml"), folder / "fleet", executor, store=store)


def test_results_are_kept_and_found_again(
    files: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "fleet.toml").write_text("".join(f'[[models]]\nname = "{n}"\ntarget = "net.py:make"\n' for n in "ab"))
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "net.pt")
    first = run(tmp_path, Processes(2))
    assert is_fine(first)
    assert {result["status"] for result in first.results.values() if result} <= {"exported", "unchanged"}
    second = run(tmp_path, Processes(1))
    assert [result and result["status"] for result in second.results.values()] == ["unchanged"] * 2

    result = second.results["a"]
    assert result is not None
    content = Store(STORE).read(f"{result['object']}/model.onnx")
    assert content is not None
    assert [node.op_type for node in onnx.load_from_string(content).graph.node] == ["Gemm", "Relu"]
    assert content == files.cat_file(f"bucket/models/{result['object']}/model.onnx")

    files.rm("bucket/models/keys", recursive=True)
    again = run(tmp_path, Processes(1)).results["a"]
    assert again is not None
    assert (again["status"], again["reasons"]) == ("exported", ["the store has no export of it any more"])


def test_a_bucket_that_is_not_there(files: s3fs.S3FileSystem, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    with pytest.raises(OnnxplugError, match=r"the store s3://nothing/models can't be written"):
        Store("s3://nothing/models").put("objects/x", tmp_path)
    assert not files.exists("nothing")
