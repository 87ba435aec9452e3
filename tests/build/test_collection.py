"""The garbage collector, held off and let go again."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import onnxplug
from onnxplug.build.collection import collection_held


def test_it_is_off_inside_and_on_again_after_an_error() -> None:
    def fail() -> None:
        with collection_held():
            assert not gc.isenabled()
            with collection_held():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ValueError("stop")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="stop"):
        fail()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with collection_held():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_thread_turns_it_on() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with collection_held():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    with collection_held():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join(30)
    assert gc.isenabled()


def test_converters_run_without_it() -> None:
    seen = []

    def convert(g, node):
        seen.append(gc.isenabled())
        return g.op.Relu(node.args[0])

    onnxplug.to_onnx(torch.relu, (torch.zeros(2),), rules=[onnxplug.Rule("aten::relu", convert)])
    assert seen == [False]
    assert gc.isenabled()
