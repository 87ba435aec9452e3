"""Runs a class of optimum.onnxruntime in a process of its own, with the version of transformers that optimum supports.

Standard input is a JSON object: ``class``, ``folder``, ``calls`` (lists by the names of inputs, or arguments of a pipeline with a
``seed``), and ``generate`` (settings, or null for one call). Standard output ends with a list of results.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from tests.support.vision import define_vision_schemas

define_vision_schemas()
_find = importlib.util.find_spec
# diffusers 0.35 and torchao 0.18 don't go together
importlib.util.find_spec = lambda name, *rest: None if name.startswith("torchao") else _find(name, *rest)


def main() -> None:
    import torch
    from optimum import onnxruntime

    job = json.loads(sys.stdin.read())
    model: Any = getattr(onnxruntime, job["class"]).from_pretrained(job["folder"])
    results = []
    for call in job["calls"]:
        if "seed" in call:
            model.set_progress_bar_config(disable=True)
            generator = torch.Generator().manual_seed(call.pop("seed"))
            results.append(model(**call, generator=generator, output_type="np").images.tolist())
            continue
        inputs = {name: torch.tensor(value) for name, value in call.items()}
        settings = job["generate"]
        results.append((model(**inputs)[0] if settings is None else model.generate(**inputs, **settings)).tolist())
    print("RESULT" + json.dumps(results))


main()
