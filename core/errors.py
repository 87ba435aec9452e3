"""The errors that onnxplug raises on purpose.

All derive from :class:`OnnxplugError`, which carries a message (what is wrong, and where) and an optional hint (what to
do about it). The command line prints both and hides the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class OnnxplugError(Exception):
    """Base class of onnxplug's errors.

    Args:
        message: What is wrong, and where.
        hint: What the user can do about it.

    Attributes:
        located: Whether the message has the operator and the user's line already.
        export: The capture, the options of the conversion and the plugins, where a conversion failed; ``onnxplug.bisect``
            reduces it.
        profile: The times until it was raised (``onnxplug_tools.profiling.profile.Profile``), if requested.
        report: The report of the export until then (``onnxplug_tools.report.report.ExportReport``), if requested.
        place: The user's ``file:line``; ``None`` where there is none, or it is not known.
    """

    message: str = ""
    hint: str | None = None
    located: bool = False
    export: Any = None
    profile: Any = None
    report: Any = None
    place: str | None = None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def add_place(self, place: str) -> None:
        """Puts the place before the message. The error stays the same object, also of a plugin's own class.

        Args:
            place: Operator, the user's line, the rule and its package, in words.
        """
        self.located = True
        if self.message:
            self.message = f"{place}: {self.message}"
            if place not in str(self):  # a class that overrides the text
                self.add_note(place)
        else:  # a class that does not call this constructor
            self.message = f"{place}: {', '.join(map(str, self.args)) or type(self).__name__}"

    def __str__(self) -> str:
        return f"{self.message}\nHint: {self.hint}" if self.hint else self.message


class UsageError(OnnxplugError, ValueError):
    """An argument is malformed: an unknown name, a wrong shape, a value out of range.

    Remedy: The message names the argument and what it may be. The command line exits with 2 for it.
    """


class WeightsError(UsageError):
    """Weights are missing, don't fit the model or were written after its export, or their file can't be read.

    Remedy: ``program.apply_weights`` with the tensors that the message names, or with all of ``model.state_dict()``.

    Attributes:
        names: The weights in question, by their names in PyTorch.
    """

    def __init__(self, message: str, *, names: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = list(names)


class NameCountError(UsageError):
    """There are more names than inputs or outputs, or too few.

    Remedy: Give a name for each value that the message lists, or one for each argument or result: its parts are called after it.
    Outputs that are not nested in each other may have fewer: the rest keep theirs.

    Attributes:
        argument: ``"input_names"`` or ``"output_names"``.
        count: How many values there are.
        called: Their names where the user gives none.
        nested: Whether some are parts of the same argument or result.
    """

    argument: str = ""
    count: int = 0
    called: Sequence[str] = ()
    nested: bool = False

    @classmethod
    def of(
        cls,
        message: str,
        argument: str,
        count: int,
        called: Sequence[str] = (),
        hint: str | None = None,
        *,
        nested: bool = False,
    ) -> NameCountError:
        """The error for an argument and the number of values."""
        error = cls(message, hint=hint)
        error.argument, error.count, error.called, error.nested = argument, count, called, nested
        return error


class CaptureError(OnnxplugError):
    """``torch.export`` could not capture the model, a dimension that should be dynamic came out static, or PyTorch itself refuses
    the dtypes of a call, which tracing does not notice.

    Remedy: ``onnxplug.diagnose`` finds the submodule and the lines; the page on what torch.export refuses has the ways round them.
    A dimension that the model's code fixes is left static, or the line that fixes it is changed.

    Attributes:
        submodule: The path of the submodule where capture stopped, empty for the model itself; ``None`` where it is not known.
        tries: The error of each attempt at capture, in a line each.
    """

    submodule: str | None = None
    tries: Sequence[str] = ()


class FixedDimensionError(CaptureError):
    """A dimension that was declared dynamic came out static, or the model takes fewer of its sizes than were declared.

    Remedy: the message names the line that fixes it. Change that line, make the dimension static in ``dynamic_shapes``, or
    declare the smaller range.
    """


class ConversionError(OnnxplugError):
    """A converter failed; the message names the operator, the rule, its package and the user's source line.

    Remedy: ``onnxplug bisect`` reduces the model to the operators that fail. Another rule may be preferred (``prefer=``) or given
    (``rules=``); a fault of a plugin's converter is its author's.
    """


class OutputMismatchError(ConversionError):
    """A converter returned values whose count, dtype, rank or dimensions differ from torch's.

    A dynamic dimension must be dynamic, and the same size.

    Remedy: It is a fault of the rule that the message names: report it to its package, and prefer another rule until then.
    """


class MissingRuleError(ConversionError):
    """Operators of the model have no rule and no decomposition.

    Remedy: Install a plugin that translates them, or give rules: ``rules=[Rule(name, convert)]``. The hint names what is known to
    supply one.

    Attributes:
        missing: Qualified operator name to the source locations at which it is used.
    """

    def __init__(self, message: str, *, missing: Mapping[str, Sequence[str]], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.missing = {name: list(places) for name, places in missing.items()}


class RuleConflictError(ConversionError):
    """Rules of two distributions claim the same operator, and nothing decides between them.

    Remedy: ``prefer={"mylib::nms": "distribution"}``, or ``--prefer``.
    """


class PluginError(OnnxplugError):
    """A plugin could not be imported, is malformed, or is required and not installed.

    Remedy: ``onnxplug plugins list`` shows the plugin's error, and ``--debug`` its traceback; ``--no-plugin NAME`` leaves it out.
    """


class UnknownPluginError(PluginError, UsageError):
    """A plugin that is requested or left out by its name is not installed, or the name is malformed.

    Remedy: ``onnxplug plugins list`` shows the names.
    """


class OpsetError(OnnxplugError):
    """The requested opset is unknown, unsupported, or contradicted by a node of the graph.

    Remedy: Ask for the opset that the message names; a rule that emits one domain in two versions is a fault of its package.
    """


class MissingPackageError(OnnxplugError, ImportError):
    """A feature needs a package that is not installed.

    Remedy: ``pip install`` of the package that the message names, or of ``"onnxplug[all]"``.
    """


class VerificationError(OnnxplugError):
    """The exported model does not run, or computes something else than the PyTorch model.

    Remedy: ``verify(intermediates=True)`` names the operator where both part, and says whether onnxplug,
    ONNX Runtime or rounding is to blame.

    Attributes:
        verdict: The verdict on who is wrong (``onnxplug_tools.diagnosis.verdict.Verdict``), if requested.
        inputs: The flattened inputs of the failed comparison, by ``verify``.
    """

    verdict: Any = None
    inputs: Sequence[Any] = ()


class EvaluationError(OnnxplugError):
    """An evaluator can't compute a node; the message names operator, node and inputs.

    Remedy: An operator of a domain of its own needs its kernel: a ``ReferenceOp``, or the library in ONNX Runtime.
    """


class SaveError(OnnxplugError):
    """The model could not be written; the old file at the destination is untouched.

    Remedy: The message has the cause, such as no space or no permission; save again when it is gone.
    """


class Decline(Exception):
    """Raised inside a converter to discard its emitted nodes and try the next rule."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Unsupported(ConversionError):
    """Raised inside a converter for a case that it cannot translate.

    Remedy: The message says which case; another opset, another target or a rule of one's own may have it.

    The interpreter adds the operator, the user's source line, shapes, opset, rule and package.
    """

    def __init__(self, reason: str, *, hint: str | None = None, context: Any = None) -> None:
        super().__init__(reason, hint=hint)
        self.reason = reason
        self.context = context
        self.located = context is not None
