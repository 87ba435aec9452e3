"""A profile as text."""

from __future__ import annotations

import io

import torch
from onnxplug_tools.profiling.observer import recording
from onnxplug_tools.profiling.profile import Profile
from rich.console import Console

import onnxplug
from onnxplug.observers import span


def test_text() -> None:
    program = onnxplug.to_onnx(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), (torch.randn(2, 4),), profile=True
    )
    profile = program.profile
    assert profile is not None
    text = str(profile)
    assert text == profile.text()
    titles = ("Stages: ", "Modules that torch.export traced", "Rules", "Rewrites", "FX nodes that took longest")
    assert [text.index(title) for title in titles] == sorted(text.index(title) for title in titles)
    for part in (
        "  capture",
        "    interpretation",
        "onnxplug.converters.activation:gelu",
        "aten::linear.default",
        "non-strict",
    ):
        assert part in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "Packages" not in text  # there is a single package
    short = profile.text(rows=1)
    assert "Rules, 1 of 2" in short
    shown = io.StringIO()
    Console(file=shown, width=160, force_terminal=True).print(profile)
    assert "\x1b[" in shown.getvalue()


def test_names_are_no_markup() -> None:
    with (
        recording() as recorder,
        span("[bold]export[/nothing]", about="[red]"),
        span("[/]", "rule", rule="[x]", package="p"),
    ):
        pass
    text = str(Profile(recorder))
    for name in ("[bold]export[/nothing]", "[red]", "[/]", "[x]"):
        assert name in text


def test_nothing_recorded() -> None:
    with recording() as recorder:
        pass
    assert str(Profile(recorder)).startswith("Stages: 0.00 s")
    assert Profile(recorder).to_dict()["stages"] == []
