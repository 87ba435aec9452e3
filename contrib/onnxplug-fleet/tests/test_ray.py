"""The same manifest on a Ray cluster of several nodes, of which one is killed. ``make test-fleet`` has Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnxplug_fleet.executors import Ray
from onnxplug_fleet.manifest import read_manifest
from onnxplug_fleet.runner import is_fine, run_fleet

ray = pytest.importorskip("ray", reason="Ray is not installed; make test-fleet installs it")
MODEL = """
import os, time, torch
def make():
    open(f"started-{os.getpid()}", "w").close()
    time.sleep(4)
    return torch.nn.ReLU(), (torch.ones(2),)
"""


def ancestors(pid: int) -> Iterator[int]:
    """The processes that a process descends from; none for a process that has ended."""
    try:
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid
    except (OSError, ValueError):
        return


def kill_when_at_work(cluster: Any, node: Any, folder: Path, killed: threading.Event) -> None:
    """Kills a node as soon as one of its processes has begun a job."""
    raylet = node.all_processes["raylet"][0].process.pid
    while not killed.is_set():
        for file in folder.glob("started-*"):
            if raylet in ancestors(int(file.name.partition("-")[2])):
                cluster.remove_node(node, allow_graceful=False)
                killed.set()
                return
        time.sleep(0.1)


def test_a_node_dies(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    (tmp_path / "net.py").write_text(MODEL)
    tables = [f'[[models]]\nname = "net{i}"\ntarget = "net.py:make"\ntimeout = 200\n' for i in range(6)]
    (tmp_path / "fleet.toml").write_text("".join(tables))
    size = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **size})
    nodes = [cluster.add_node(num_cpus=1, **size) for _ in range(2)]
    killed = threading.Event()
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        threading.Thread(target=kill_when_at_work, args=(cluster, nodes[0], tmp_path, killed), daemon=True).start()
        done = run_fleet(read_manifest(tmp_path / "fleet.toml"), tmp_path / "fleet", Ray("ray"))
        assert killed.is_set(), "no job was done on the node"
        assert is_fine(done), done.results
        assert len(list(tmp_path.glob("started-*"))) > 6, "the job of the node that was killed is begun once more"
    finally:
        killed.set()
        ray.shutdown()
        cluster.shutdown()
