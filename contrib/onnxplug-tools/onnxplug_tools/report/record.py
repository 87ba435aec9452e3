"""The content of a report: plain values, which hold neither the model nor its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnxplug_tools.report.differences import CaseDifference, Histogram

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxplug_tools.inspection.view import ModelView
    from onnxplug_tools.report.times import Times


@dataclass(frozen=True)
class MissingRule:
    """An operator that has no rule.

    Attributes:
        places: The user's lines at which it is called, ``file:line``.
        reasons: Further facts about the calls, in words; may be empty.
    """

    op: str
    places: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """Why an export failed.

    Attributes:
        stage: ``"arguments"``, ``"loading"``, ``"plugins"``, ``"capture"``, ``"conversion"``, ``"verification"`` or ``"saving"``.
        place: The user's ``file:line``; ``None`` where it is not known.
        submodule: Path of the submodule at which capture stopped, as far as that is known.
        tries: The outcome of each attempt at capture.
        missing: The operators that have no rule.
        traceback: The traceback of an error that onnxplug did not raise on purpose; else empty.
    """

    stage: str
    error: str
    message: str
    hint: str | None = None
    place: str | None = None
    submodule: str | None = None
    tries: tuple[str, ...] = ()
    missing: tuple[MissingRule, ...] = ()
    traceback: str = ""


@dataclass(frozen=True)
class Plugin:
    """An installed plugin.

    Attributes:
        status: ``"loaded"``, ``"failed"``, ``"blocked"`` or ``"not loaded"``.
        error: The last line of its error; empty where it has none.
    """

    name: str
    distribution: str
    version: str
    status: str
    error: str = ""


@dataclass(frozen=True)
class Attempt:
    """An attempt at capture.

    Attributes:
        mode: torch.export's mode and the reading of the dynamic shapes, in words.
        error: Class and first line of its error; ``None`` for the attempt that succeeded.
    """

    mode: str
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class SizeCondition:
    """A condition of the model's Python code on dynamic sizes, which the exported model takes for granted.

    Attributes:
        place: The user's ``file:line``.
        only_small: Whether only the size 1 does not fulfil it: often the model is right there too.
    """

    text: str
    place: str | None
    only_small: bool


@dataclass
class Capture:
    """How the model was captured.

    Attributes:
        strategy: ``"non-strict"``, ``"strict"``, ``"given"`` …
        repeated: How many operator calls repeated the nodes of an equal one.
        dimensions: Name of each dynamic dimension to its range, ``"2 to 128"``.
    """

    strategy: str = ""
    seconds: float = 0.0
    nodes: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    repeated: int = 0
    dimensions: dict[str, str] = field(default_factory=dict)
    conditions: list[SizeCondition] = field(default_factory=list)


@dataclass(frozen=True)
class Decomposed:
    """An operator that torch decomposed.

    Attributes:
        op: The operator; the whole program was decomposed because of it where ``by`` says so.
    """

    op: str
    by: str
    times: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Rewritten:
    """A rewrite that was applied.

    Attributes:
        nodes: Number of nodes of the model that it made, or that were made of its nodes.
    """

    name: str
    package: str
    times: int
    nodes: int
    seconds: float


@dataclass(frozen=True)
class Warned:
    """A warning that was shown.

    Attributes:
        place: The ``file:line`` that it is about.
    """

    category: str
    text: str
    place: str


@dataclass(frozen=True)
class Table:
    """A table with the findings of an observer of a plugin."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass
class Verification:
    """The comparisons of verification.

    Attributes:
        cases: The sets of inputs, a set that is not accepted included.
        skipped: Sizes that were drawn and that PyTorch itself rejects.
        error: Why it failed; ``None`` where everything is accepted.
    """

    cases: list[CaseDifference] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def histogram(self) -> Histogram:
        """The differences of all elements of all outputs of all cases."""
        together = Histogram()
        for case in self.cases:
            for output in case.outputs:
                if output.histogram is not None:
                    together.add(output.histogram)
        return together

    @property
    def max_abs_difference(self) -> float:
        """The largest difference of all."""
        return max((output.max_abs_difference for case in self.cases for output in case.outputs), default=0.0)


@dataclass(frozen=True)
class File:
    """A file that was written.

    Attributes:
        bytes: Its size with the data beside it.
    """

    path: str
    bytes: int


@dataclass
class Facts:
    """The facts about an export, and the reason of its failure if it failed.

    Attributes:
        model: Class of the model, or the name of a function.
        began: The time of day at which the export began, in ISO 8601.
        failure: Why it failed; ``None`` where it succeeded.
        versions: Package to version: onnxplug, torch, onnx, Python and others.
        arguments: The arguments that were given, summarised: tensors by dtype and shape, never by their values.
        inputs, outputs: Name and type (``"float[batch, 3]"``) of each.
        sizes: Sizes of the dynamic dimensions in the export's own inputs, for which operations are estimated.
        folded: Operator to how often it was computed from constants during the export.
        functions: Function to the number of calls of modules that it stands for.
        packages: Distribution to the number of nodes that its rules made.
        verification: The comparisons of verification; ``None`` where nothing was compared.
        view: The content of the model; ``None`` where there is no model yet.
    """

    model: str = ""
    began: str = ""
    failure: Failure | None = None
    versions: dict[str, str] = field(default_factory=dict)
    system: str = ""
    plugins: list[Plugin] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    opsets: dict[str, int] = field(default_factory=dict)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    capture: Capture | None = None
    decomposed: list[Decomposed] = field(default_factory=list)
    folded: dict[str, int] = field(default_factory=dict)
    rewrites: list[Rewritten] = field(default_factory=list)
    functions: dict[str, int] = field(default_factory=dict)
    packages: dict[str, int] = field(default_factory=dict)
    times: Times | None = None
    verification: Verification | None = None
    warnings: list[Warned] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    view: ModelView | None = field(default=None, repr=False)

    @property
    def status(self) -> str:
        """``"exported"``, or ``"failed"``."""
        return "exported" if self.failure is None else "failed"

    @property
    def seconds(self) -> float:
        """How long everything took."""
        return self.times.seconds if self.times is not None else 0.0

    def take_ends(self, model: ir.Model) -> None:
        """Takes the names and types of a model's inputs and outputs."""
        from onnxplug.text import value_text

        self.inputs = [(str(value.name), value_text(value)) for value in model.graph.inputs]
        self.outputs = [(str(value.name), value_text(value)) for value in model.graph.outputs]
