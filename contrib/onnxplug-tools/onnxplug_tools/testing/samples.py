"""Checks of ``onnxplug_samples``: each sample exported and compared with eager PyTorch at every opset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxplug.errors import OnnxplugError, PluginError
from onnxplug.opsets import MIN_OPSET, max_opset
from onnxplug.plugins.api import OpSample
from onnxplug.registry.names import packet_of
from onnxplug.registry.rule import Rule
from onnxplug.verification.ready import newest_loadable_opset

if TYPE_CHECKING:
    import torch

    from onnxplug.program import OnnxProgram


@dataclass(frozen=True)
class SampleCase:
    """One sample at one opset.

    Attributes:
        plugin: The distribution that promises it.
        sample: Operator and inputs.
        opset: Version of ai.onnx.
        domains: Versions of other domains that the rule asks for.
    """

    plugin: str
    sample: OpSample
    opset: int
    domains: Mapping[str, int]

    def __str__(self) -> str:
        domains = "".join(f"-{name}{version}" for name, version in self.domains.items())
        return f"{self.sample.op}-opset{self.opset}{domains}"

    def check(self, registry: tuple[Any, Any] | None = None) -> OnnxProgram:
        """Exports the sample and compares it with eager PyTorch, on its inputs and ``others``, or else random inputs.

        Args:
            registry: A registry and its plugin manager; all installed plugins when ``None``.

        Returns:
            The program. At an opset that the installed ONNX Runtime does not load it is converted and not run.

        Raises:
            OnnxplugError: The export or the comparison failed; the message names the sample and the opset.
        """
        import onnxplug

        model, inputs, shapes = sample_model(self.sample)
        try:
            program = onnxplug.to_onnx(
                model,
                inputs,
                dynamic_shapes=shapes,
                opset_version={"": self.opset, **self.domains},
                registry=registry,
            )
            if self.opset <= newest_loadable_opset():
                others = self.sample.others
                program.verify(seeds=(0, 1, 2) if others is None else ())
                for other in others or ():
                    other_inputs = sample_args(self.sample, other)
                    program.verify(args=(other_inputs, dict(self.sample.kwargs)), kwargs={}, seeds=())
        except OnnxplugError as error:
            error.add_place(f"the sample of {self.sample.op} of {self.plugin} at opset {self.opset}")
            raise
        return program


def sample_model(sample: OpSample) -> tuple[torch.nn.Module, tuple[Any, ...], Any]:
    """A module that calls the sample's operator, its example inputs, and their dynamic shapes."""
    import torch

    namespace, _, rest = sample.op.partition("::")
    packet, _, overload = rest.partition(".")
    operator = getattr(getattr(torch.ops, namespace), packet, None)
    operator = getattr(operator, overload, None) if overload else operator
    args = sample_args(sample, sample.args)
    # Looked up again: the function that makes the inputs may import the module that defines the operator.
    operator = operator or getattr(getattr(torch.ops, namespace), packet, None)
    if operator is None:
        raise PluginError(
            f"torch does not know the sample's operator {sample.op}",
            hint="The plugin's module must import what defines it.",
        )
    kwargs = dict(sample.kwargs)
    shapes = None
    if sample.dynamic_shapes is not None:
        shapes = (tuple(sample.dynamic_shapes), dict.fromkeys(kwargs))
    return _module(operator, sample.results), (args, kwargs), shapes


def sample_args(sample: OpSample, args: Any) -> tuple[Any, ...]:
    """Positional arguments of a sample, made if they are a function; dtypes by name, as torch.export takes no dtype."""
    import torch

    try:
        made = args() if callable(args) else args
        return tuple(str(item) if isinstance(item, torch.dtype) else item for item in made)
    except Exception as error:
        raise PluginError(f"the inputs of the sample of {sample.op} raised {type(error).__name__}: {error}") from error


def _module(operator: Any, results: Sequence[int] | None) -> torch.nn.Module:
    import torch

    class Sample(torch.nn.Module):
        """Calls one operator."""

        def forward(self, args: Any, kwargs: Any) -> Any:
            results_of_call = operator(*[_as_dtype(item) for item in args], **kwargs)
            return results_of_call if results is None else [results_of_call[position] for position in results]

    return Sample().eval()


def _as_dtype(item: Any) -> Any:
    import torch

    return getattr(torch, item[6:]) if isinstance(item, str) and item.startswith("torch.") else item


def cases_of(plugin: str, samples: Iterable[OpSample], rules: Sequence[Rule]) -> list[SampleCase]:
    """Every sample at every opset that it, or else its operator's rules, claim."""
    newest = max_opset()
    cases = []
    for sample in samples:
        own = [r for r in rules if sample.op in (r.op, packet_of(r.op)) or r.op == packet_of(sample.op)]
        seen = set()
        for opset in range(MIN_OPSET, newest + 1):
            if sample.opsets and opset not in sample.opsets:
                continue
            holding = [r for r in own if (r.opset[0] or 0) <= opset <= (r.opset[1] or newest)]
            # A sample without a rule is one of the hook onnxplug_missing or of a decomposition: it claims every opset.
            for domains in [r.domains for r in holding] if own else [{}]:
                key = (opset, tuple(sorted(domains.items())))
                if key not in seen:
                    seen.add(key)
                    cases.append(SampleCase(plugin, sample, opset, domains))
    return cases
