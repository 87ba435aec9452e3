"""onnx's own evaluator, for models that neither ONNX Runtime nor a plugin's evaluator runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from onnxplug.errors import EvaluationError, OnnxplugError
from onnxplug.text import in_a_line

#: The package for models that onnx's evaluator does not run.
MORE = "pip install onnxplug-reference, whose evaluator runs more operators and element types."


class OnnxEvaluator(ReferenceEvaluator):
    """onnx's evaluator: infinities and NaN are ordinary values, and errors name the package that may do better."""

    def run(self, *args: Any, **options: Any) -> Any:
        """Runs the model.

        Raises:
            EvaluationError: It does not run.
        """
        try:
            with np.errstate(all="ignore"):
                return super().run(*args, **options)
        except OnnxplugError:
            raise
        except Exception as error:
            raise EvaluationError(
                f"onnx.reference fails: {type(error).__name__}: {in_a_line(error)}", hint=MORE
            ) from error


def onnx_evaluator(source: str | bytes, kernels: Collection[type]) -> OnnxEvaluator:
    """onnx's evaluator of a model, in the form of the hook ``onnxplug_evaluators``.

    Raises:
        EvaluationError: It has no kernel of an operator, or the model can't be read.
    """
    try:
        model = onnx.load(source) if isinstance(source, str) else onnx.load_model_from_string(source)
        return OnnxEvaluator(_inlined(model, kernels), new_ops=list(kernels))
    except Exception as error:
        raise EvaluationError(in_a_line(error), hint=MORE) from error


def _inlined(model: onnx.ModelProto, kernels: Collection[type]) -> onnx.ModelProto:
    """The model without functions: within functions onnx's evaluator finds neither plugins' kernels nor later functions."""
    if not model.functions:
        return model
    import onnx.inliner

    computed = {(getattr(kernel, "op_domain", ""), kernel.__name__) for kernel in kernels}
    kept = [(f.domain, f.name) for f in model.functions if (f.domain, f.name) in computed]
    return onnx.inliner.inline_selected_functions(model, kept, exclude=True)
