"""The same manifest on a Ray cluster of several nodes, of which one is killed. ``make test-fleet`` has Ray."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from onnxplug_fleet.executors import Ray
from onnxplug_fleet.manifest import read_manifest
from onnxplug_fleet.runner import is_fine, run_fleet

ray = pytest.importorskip("ray", reason="Ray is not installed; make test-fleet installs it")
MODEL = "import torch, time\ndef make():\n    time.sleep(3)\n    return torch.nn.ReLU(), (torch.ones(2),)\n"


def test_a_node_dies(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    (tmp_path / "net.py").write_text(MODEL)
    tables = [f'[[models]]\nname = "net{i}"\ntarget = "net.py:make"\ntimeout = 200\n' for i in range(4)]
    (tmp_path / "fleet.toml").write_text("".join(tables))
    size = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **size})
    nodes = [cluster.add_node(num_cpus=1, **size) for _ in range(2)]
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        threading.Thread(target=lambda: (time.sleep(15), cluster.remove_node(nodes[0], allow_graceful=False))).start()
        done = run_fleet(read_manifest(tmp_path / "fleet.toml"), tmp_path / "fleet", Ray("ray"))
        assert is_fine(done), done.results
    finally:
        ray.shutdown()
        cluster.shutdown()
