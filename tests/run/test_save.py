"""Saving: complete or not at all, and the old model whole whatever happens."""

from __future__ import annotations

import io
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnxplug
from onnxplug import SaveError
from onnxplug.run import save
from tests.run.saved import age, names, program, weight


@pytest.mark.parametrize("external", [False, True])
def test_saves_and_replaces(tmp_path: Path, programs: Any, external: bool) -> None:
    path = tmp_path / "model.onnx"
    for number, model in enumerate((*programs, programs[0]), start=1):
        model.save(path, external_data=external)
        assert weight(path) == (1.0 if number != 2 else 2.0)
        assert len(list(tmp_path.iterdir())) == (2 if external else 1), "older data files and staging are gone"
    session_input = {"input": np.ones((1, 32), np.float32)}
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    assert session.run(None, {session.get_inputs()[0].name: session_input["input"]})[0].shape == (1, 32)


def test_from_external_to_single_file(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=True)
    programs[1].save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert weight(path) == 2.0


def test_large_models_go_external_by_themselves(tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "LARGE_MODEL_BYTES", 1000)
    programs[0].save(tmp_path / "model.onnx")
    assert names(tmp_path) == ["model.onnx", "model.onnx.data"]


def test_no_data_file_when_no_tensor_is_large(tmp_path: Path) -> None:
    small = onnxplug.to_onnx(torch.nn.Linear(2, 2).eval(), (torch.randn(1, 2),))
    small.save(tmp_path / "model.onnx", external_data=True)
    assert names(tmp_path) == ["model.onnx"]
    program(1.0).save(tmp_path / "model.onnx", external_data=True)
    small.save(tmp_path / "model.onnx", external_data=True)
    assert names(tmp_path) == ["model.onnx"]


class Trickle(io.RawIOBase):
    """An unbuffered file that takes seven bytes at a time."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: Any) -> int:
        self.content += bytes(data[:7])
        return len(data[:7])


def test_to_a_file_object(tmp_path: Path, programs: Any) -> None:
    buffer = io.BytesIO()
    programs[0].save(buffer)
    assert onnx.load_from_string(buffer.getvalue()).graph.node[0].op_type == "Gemm"
    trickle = Trickle()
    programs[0].save(trickle)
    assert trickle.content == buffer.getvalue()
    with open(tmp_path / "model.onnx", "wb") as file:
        programs[0].save(file)
    assert weight(tmp_path / "model.onnx") == 1.0
    with pytest.raises(SaveError, match="file object"):
        programs[0].save(io.StringIO())
    with pytest.raises(SaveError, match="file object"):
        programs[0].save(buffer, external_data=True)
    with pytest.raises(SaveError, match="file object"), open("/dev/full", "wb", buffering=0) as file:
        programs[0].save(file)


def test_weights_as_inputs_or_left_out(tmp_path: Path, programs: Any) -> None:
    programs[0].save(tmp_path / "a.onnx", keep_initializers_as_inputs=True)
    assert len(onnx.load(tmp_path / "a.onnx").graph.input) == 3
    programs[0].save(tmp_path / "b.onnx", include_initializers=False)
    assert not onnx.load(tmp_path / "b.onnx").graph.initializer
    assert programs[0](torch.randn(1, 32))[0].shape == (1, 32), "the program itself keeps its weights"


def snapshot(model: Any) -> Any:
    graph = model.graph
    stored = [(name, id(v), id(v.const_value), v.const_value.name) for name, v in graph.initializers.items()]
    return stored, [id(v) for v in graph.inputs], [v.is_graph_input() for v in graph.initializers.values()]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("as_inputs", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_saving_changes_nothing_in_the_program(
    tmp_path: Path, programs: Any, external: bool, stored: bool, as_inputs: bool, fails: bool
) -> None:
    before, proto = snapshot(programs[0].model), programs[0].model_proto
    settings = {"include_initializers": stored, "keep_initializers_as_inputs": as_inputs, "external_data": external}
    if fails:
        with pytest.raises(SaveError):
            programs[0].save(tmp_path / "nowhere" / "model.onnx", **settings)
    else:
        programs[0].save(tmp_path / "model.onnx", **settings)
        assert names(tmp_path) == ["model.onnx", "model.onnx.data"][: 1 + (external and stored)]
        saved = onnx.load(tmp_path / "model.onnx").graph
        assert len(saved.initializer) == (2 if stored else 0)
        assert len(saved.input) == (3 if as_inputs else 1)
    assert snapshot(programs[0].model) == before
    assert programs[0].model_proto == proto


# -- what else lies there ----------------------------------------------------------------------------------------------


def test_a_copied_model_keeps_its_data(tmp_path: Path, programs: Any) -> None:
    path, backup = tmp_path / "model.onnx", tmp_path / "backup.onnx"
    programs[0].save(path, external_data=True)
    shutil.copy(path, backup)
    for value in (2.0, 1.0, 2.0):
        program(value).save(path, external_data=True)
        assert (weight(path), weight(backup)) == (value, 1.0)
    assert names(tmp_path) == ["backup.onnx", "model.onnx", "model.onnx.data", "model.onnx.data.2"]
    programs[1].save(path)
    assert (weight(path), weight(backup)) == (2.0, 1.0)
    backup.unlink()
    programs[0].save(path, external_data=True)
    age(tmp_path)
    programs[0].save(path, external_data=True)
    assert len(names(tmp_path)) == 2, "what the backup read is read by nothing now"


def test_a_backup_of_another_ending_keeps_its_data(tmp_path: Path, programs: Any) -> None:
    path, backup = tmp_path / "model.onnx", tmp_path / "model.onnx.bak"
    programs[0].save(path, external_data=True)
    path.rename(backup)
    programs[1].save(path, external_data=True)
    assert (weight(path), weight(backup)) == (2.0, 1.0)


def test_the_names_of_data_take_turns(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "model.onnx"
    for number in range(4):
        programs[0].save(path, external_data=True)
        assert names(tmp_path) == ["model.onnx", "model.onnx.data" + (".2" if number % 2 else "")]


def test_a_neighbour_of_another_tool_keeps_its_data(tmp_path: Path, programs: Any) -> None:
    """The reference is found wherever a tensor stands, in a name beside others, and also behind ``./``."""
    path, neighbour = tmp_path / "model.onnx", tmp_path / "other.onnx"
    programs[0].save(path, external_data=True)
    before = (tmp_path / "model.onnx.data").read_bytes()
    tensor = onnx.TensorProto(name="c", data_type=onnx.TensorProto.FLOAT, dims=[4], data_location=1)
    for key, value in (("offset", "0"), ("length", "16"), ("location", "./model.onnx.data")):
        tensor.external_data.add(key=key, value=value)
    inner = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["c"], value=tensor)], "inner", [], [])
    node = onnx.helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    neighbour.write_bytes(
        onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [])).SerializeToString() + bytes(5)
    )
    for number in range(2):
        programs[1].save(path, external_data=True)
        assert weight(path) == 2.0
        assert (tmp_path / "model.onnx.data").read_bytes() == before
        assert len(names(tmp_path)) == 4, f"save {number}"


def test_data_that_is_missing_is_not_made_for_another_model(tmp_path: Path, programs: Any) -> None:
    """A model whose data is gone stays without data: it must not get another model's weights."""
    path, backup = tmp_path / "model.onnx", tmp_path / "backup.onnx"
    programs[0].save(path, external_data=True)
    path.rename(backup)
    (tmp_path / "model.onnx.data").unlink()
    programs[1].save(path, external_data=True)
    assert names(tmp_path) == ["backup.onnx", "model.onnx", "model.onnx.data.2"]
    with pytest.raises(Exception, match=r"model\.onnx\.data"):
        onnx.load(backup)


def test_leftovers_of_killed_saves_are_removed(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "model.onnx"
    for name in ("model.onnx.data", "model.onnx.data.7", "model.onnx.data.2-00001-of-00003", ".onnxplug-0123.tmp"):
        (tmp_path / name).write_bytes(b"the beginning of weights")
    (tmp_path / "other.onnx.data").write_bytes(b"of another model")
    age(tmp_path)
    for name in ("model.onnx.data.8", ".onnxplug-4567.tmp"):
        (tmp_path / name).write_bytes(b"of a process that saves now")
    programs[0].save(path)
    assert names(tmp_path) == [".onnxplug-4567.tmp", "model.onnx", "model.onnx.data.8", "other.onnx.data"]


def test_another_model_of_the_folder_keeps_its_data(tmp_path: Path, programs: Any) -> None:
    programs[0].save(tmp_path / "a.onnx", external_data=True)
    programs[1].save(tmp_path / "b.onnx", external_data=True)
    programs[1].save(tmp_path / "a.onnx")
    assert names(tmp_path) == ["a.onnx", "b.onnx", "b.onnx.data"]


def test_data_under_a_name_of_another_tool_stays(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(programs[0].model_proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    programs[1].save(path)
    assert names(tmp_path) == ["model.onnx", "weights.bin"]


def test_a_model_that_reads_its_own_file_is_saved_over_it(tmp_path: Path, programs: Any) -> None:
    path = tmp_path / "model.onnx"
    programs[0].save(path, external_data=True)
    loaded = ir.load(path)
    for external in (True, False, True):
        save.save_model(loaded, path, external_data=external)
        assert weight(path) == 1.0
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        save.save_model(loaded, elsewhere / "model.onnx", external_data=not external)
        assert weight(elsewhere / "model.onnx") == 1.0, "the loaded model still has its weights"


def test_permissions_are_kept(tmp_path: Path, programs: Any) -> None:
    path, data = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    programs[0].save(path, external_data=True)
    fresh = tmp_path / "fresh"
    fresh.touch()
    assert path.stat().st_mode == data.stat().st_mode == fresh.stat().st_mode
    path.chmod(0o640)
    data.chmod(0o600)
    programs[1].save(path, external_data=True)
    assert path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "model.onnx.data.2").stat().st_mode & 0o777 == 0o600


# -- where a path leads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_symbolic_links_stay(tmp_path: Path, programs: Any, external: bool, exists: bool, relative: bool) -> None:
    target, link, second = tmp_path / "model.onnx", tmp_path / "latest.onnx", tmp_path / "second.onnx"
    if exists:
        programs[0].save(target, external_data=external)
    link.symlink_to(target.name if relative else target)
    second.symlink_to(link)
    for number in range(2):
        programs[1].save(second, external_data=external)
        assert link.is_symlink()
        assert second.is_symlink()
        assert not target.is_symlink()
        assert weight(target) == weight(link) == 2.0
        data = {False: [], True: ["model.onnx.data" + (".2" if number != exists else "")]}[external]
        assert names(tmp_path) == sorted(["latest.onnx", "model.onnx", "second.onnx", *data])


def test_a_link_to_another_folder(tmp_path: Path, programs: Any) -> None:
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "model.onnx"
    link.symlink_to(real / "net.onnx")
    programs[0].save(link)
    assert weight(link) == 1.0
    with pytest.warns(UserWarning, match=r"is a link to .*net.onnx"):
        programs[1].save(link, external_data=True)
    assert weight(real / "net.onnx") == 2.0
    assert names(real) == ["net.onnx", "net.onnx.data"]
    assert names(tmp_path) == ["model.onnx", "real"]


def test_a_folder_that_is_a_link(tmp_path: Path, programs: Any) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    programs[0].save(tmp_path / "link" / "model.onnx", external_data=True)
    assert weight(tmp_path / "link" / "model.onnx") == 1.0


def test_relative_paths_and_odd_names(tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a b").mkdir()
    for place in ("model.onnx", "./a b/m o (1).onnx", "a b/../noending", "a b/ünïcödé.onnx", b"bytes.onnx"):
        for model, value in zip((programs[0], programs[1]), (1.0, 2.0), strict=True):
            model.save(place, external_data=True)
            assert weight(Path(os.fsdecode(place))) == value
    long = "x" * 240 + ".onnx"
    programs[0].save(long, external_data=True)
    assert weight(Path(long)) == 1.0


def test_names_that_the_system_refuses(tmp_path: Path, programs: Any) -> None:
    for place in ("x" * 300 + ".onnx", "a\0b.onnx"):
        with pytest.raises(SaveError, match="can't write"):
            programs[0].save(tmp_path / place)
    with pytest.raises(SaveError, match="not UTF-8"):
        programs[0].save(os.fsencode(tmp_path) + b"/\xff.onnx", external_data=True)
    assert names(tmp_path) == []


def _unchanging(path: Path) -> tuple[int, ...]:
    """A file's status, but for the time of the last read, which a look at a link changes."""
    status = os.lstat(path)
    return (*status[:7], status.st_mtime_ns, status.st_ctime_ns)


def test_only_regular_files_are_replaced(tmp_path: Path, programs: Any) -> None:
    fifo, folder, link = tmp_path / "fifo", tmp_path / "folder.onnx", tmp_path / "link.onnx"
    os.mkfifo(fifo)
    folder.mkdir()
    link.symlink_to(fifo)
    loop = tmp_path / "loop.onnx"
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        before = {p: _unchanging(p) for p in tmp_path.iterdir()}
        places = {"/dev/null": "device", fifo: "FIFO", link: "FIFO", folder: "folder", tmp_path / "socket": "socket"}
        for place, kind in {**places, loop: "symbolic links"}.items():
            for external in (False, True):
                with pytest.raises(SaveError, match=f"{kind}"):
                    programs[0].save(place, external_data=external)
        assert {p: _unchanging(p) for p in tmp_path.iterdir()} == before
    read, write = os.pipe()
    with pytest.raises(SaveError, match="FIFO"):
        programs[0].save(f"/dev/fd/{write}")
    os.close(read)
    os.close(write)


def test_data_never_replaces_a_file_that_is_not_regular(tmp_path: Path, programs: Any) -> None:
    other = tmp_path / "other"
    other.write_text("mine", encoding="utf-8")
    (tmp_path / "model.onnx.data").symlink_to(other)
    os.mkfifo(tmp_path / "model.onnx.data.2")
    programs[0].save(tmp_path / "model.onnx", external_data=True)
    assert weight(tmp_path / "model.onnx") == 1.0
    assert names(tmp_path) == sorted(["model.onnx", *(f"model.onnx.data{n}" for n in ("", ".2", ".3")), "other"])
    assert other.read_text(encoding="utf-8") == "mine"


def as_nobody(action: Any) -> str:
    """The class and the message of the error that an action raises in a process without root's rights."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            action()
            os.write(write, b"nothing")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="root alone can become someone else")
def test_permissions_that_lack(programs: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model.onnx"
        programs[0].save(path)
        folder.chmod(0o755)
        assert "SaveError: can't write" in as_nobody(lambda: programs[1].save(path))
        folder.chmod(0o777)
        assert "write-protected" in as_nobody(lambda: programs[1].save(path))
        assert weight(path) == 1.0
        assert names(folder) == ["model.onnx"]
        (folder / "model.onnx.data").touch(0o600)
        path.chmod(0o666)
        assert as_nobody(lambda: programs[1].save(path, external_data=True)) == "nothing"
        assert weight(path) == 2.0
        assert names(folder) == ["model.onnx", "model.onnx.data", "model.onnx.data.2"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere/model.onnx", "no folder"),
        (".", "it is a folder"),
        ("file/model.onnx", "no folder"),
        ("dangling/model.onnx", "no folder"),
        ("link.onnx", "no folder"),
    ],
)
def test_places_that_cannot_be_written(tmp_path: Path, programs: Any, place: str, message: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "link.onnx").symlink_to("nowhere/model.onnx")
    before = names(tmp_path)
    with pytest.raises(SaveError, match=message):
        programs[0].save(tmp_path / place)
    assert names(tmp_path) == before


def test_a_full_disk_is_seen_before_writing(tmp_path: Path, programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(SaveError, match=r"needs [\d.]+ \w+ and .* has 100 bytes free"):
        programs[0].save(tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
