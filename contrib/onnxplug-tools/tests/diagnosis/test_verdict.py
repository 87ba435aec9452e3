"""``verify(intermediates=True)``: the operator that differs, and who is at fault."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools.diagnosis import verdict as verdicts
from onnxplug_tools.diagnosis.verdict import EVALUATOR, ORT_OFF, ORT_ON, PLAIN, Culprit, Verdict, Walk
from torch import nn

import onnxplug
from onnxplug import Rewrite, Rule, VerificationError, hookimpl
from onnxplug.verification.runs import Runs
from tests.support.check import Call


def blamed(program: onnxplug.OnnxProgram, **options: Any) -> Verdict:
    """The verdict on a program that is wrong."""
    with pytest.raises(VerificationError) as caught:
        program.verify(intermediates=True, **options)
    verdict = caught.value.verdict
    assert isinstance(verdict, Verdict)
    assert str(verdict) in caught.value.message
    return verdict


def right(program: onnxplug.OnnxProgram, **options: Any) -> Verdict:
    """The verdict on a program that is right."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = program.verify(intermediates=True, **options).intermediates
    assert verdict.culprit is Culprit.NOBODY, str(verdict)
    return verdict


class Layers(nn.Module):
    """The wrong operator stands in the middle, and the operator after it enlarges its fault."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).softmax(-1)
        hidden = hidden.relu() - hidden.tanh()  # the user's line
        return self.last(hidden).exp()


LINE = next(
    n for n, text in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1) if "# the user's" in text
)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def wrong_tanh(g: Any, node: Any) -> Any:
    """Sinh instead of Tanh."""
    return g.op.Sinh(node.args[0])


WRONG = Rule("aten::tanh.default", wrong_tanh)


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("dynamic", [None, ({0: "batch"},)])
def test_a_wrong_rule(optimize: bool, dynamic: Any) -> None:
    program = onnxplug.to_onnx(Layers(), (X,), rules=[WRONG], optimize=optimize, dynamic_shapes=dynamic)
    verdict = blamed(program)
    assert verdict.culprit is Culprit.RULE
    assert verdict.name == f"{__name__}:wrong_tanh (for aten::tanh.default)"
    first = verdict.first
    assert first is not None
    assert (first.node, first.operator, first.location) == ("tanh", "aten::tanh.default", f"{__file__}:{LINE}")
    plain = verdict.walks[PLAIN]
    assert isinstance(plain, Walk)
    # Only the operator itself differs, not the operators that read its result.
    assert [d.operator for d in plain.differences] == ["aten::tanh.default"]
    torch.testing.assert_close(torch.sinh(torch.atanh(first.expected)), first.actual)
    assert first.comparison.actual != pytest.approx(first.comparison.expected)


def test_a_rule_that_gives_its_input_back() -> None:
    """The operator's result has no node of its own."""
    nothing = Rule("aten::tanh", lambda g, node: node.args[0])
    for model in (lambda x: x.tanh().exp(), lambda x: (x + 1).tanh().exp(), lambda x: x.tanh()):
        verdict = blamed(onnxplug.to_onnx(Call(model), (X,), rules=[nothing]))
        assert (verdict.culprit, verdict.first and verdict.first.operator) == (Culprit.RULE, "aten::tanh.default")


def test_a_wrong_rule_within_a_branch() -> None:
    """The rule of torch.cond is not the only one that may be at fault."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > -99, lambda x: x.tanh(), lambda x: x + 1, (x,))

    verdict = blamed(onnxplug.to_onnx(Call(model), (X,), rules=[WRONG]))
    assert verdict.culprit is Culprit.RULE
    assert verdict.name.endswith("(for cond), or that of an operator in its branches or body")


def test_the_rule_of_an_item_and_a_wrong_size() -> None:
    def largest(x: torch.Tensor) -> Any:
        values, places = x.topk(2)
        return values + 1, places

    def smallest(g: Any, node: Any) -> Any:
        return g.op.TopK(node.args[0], [2], largest=0, _outputs=2)

    verdict = blamed(onnxplug.to_onnx(Call(largest), (X,), rules=[Rule("aten::topk", smallest)]))
    assert verdict.culprit is Culprit.RULE
    assert verdict.first is not None
    assert verdict.first.operator == "aten::topk.default"
    assert "smallest" in verdict.first.rule


def test_a_wrong_rule_for_complex_numbers() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (torch.fft.fft(x) * 2).abs()

    def size(g: Any, node: Any) -> Any:
        return g.op.Abs(node.args[0].real)

    verdict = blamed(onnxplug.to_onnx(Call(model), (X,), rules=[Rule("complex:aten::abs", size)]))
    assert (verdict.culprit, verdict.first and verdict.first.node) == (Culprit.RULE, "abs_1")


class WrongRewrite:
    """Replaces Softmax over the last axis by Softmax over the first."""

    @hookimpl
    def onnxplug_rewrites(self) -> list[Rewrite]:
        def other_axis(g: Any, node: Any) -> Any:
            axis = node.attributes.get_int("axis", -1)
            return g.op.Softmax(node.inputs[0], axis=0) if axis != 0 else None

        return [Rewrite("other_axis", "Softmax", other_axis)]


@pytest.mark.parametrize("target", ["onnxruntime", None])
def test_a_wrong_rewrite(isolated_registry: Any, target: str | None) -> None:
    isolated_registry.add_plugin(WrongRewrite(), name="wrong")
    verdict = blamed(onnxplug.to_onnx(Layers(), (X,), target=target))
    assert (verdict.culprit, verdict.name) == (Culprit.REWRITE, "other_axis")
    assert verdict.first is not None
    assert verdict.first.operator.startswith("aten::softmax")
    plain, rewritten = verdict.walks[PLAIN], verdict.walks[EVALUATOR]
    assert isinstance(plain, Walk)
    assert isinstance(rewritten, Walk)
    assert (len(plain.differences), len(rewritten.differences)) == (0, 1)
    right(onnxplug.to_onnx(Layers(), (X,), target=target, optimize=False))


def test_a_wrong_simplification() -> None:
    def careless(g: Any, node: Any) -> Any:
        return g.op.Relu(node.args[0]) if not g.optimize else node.args[0]

    program = onnxplug.to_onnx(Call(lambda x: x.relu() + 1), (X,), rules=[Rule("aten::relu", careless)])
    assert blamed(program).culprit is Culprit.SIMPLIFICATION


def test_a_model_that_was_changed() -> None:
    program = onnxplug.to_onnx(Layers(), (X,))
    for node in program.model.graph:
        if node.op_type == "Tanh":
            node.op_type = "Cos"
    verdict = blamed(program)
    assert verdict.culprit is Culprit.CHANGE
    assert verdict.first is not None
    assert verdict.first.operator == "aten::tanh.default"


# -- ONNX Runtime ----------------------------------------------------------------------------------------------------------


def test_an_optimiser_of_onnxruntime() -> None:
    """Padding of 0 becomes the pool's padding of minus infinity, unless the padded image is an output."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ConstantPad2d(1, 0.0), nn.MaxPool2d(2), nn.Sigmoid())
    torch.manual_seed(0)
    program = onnxplug.to_onnx(model, (-torch.rand(1, 1, 6, 6) - 1,), target=None)
    verdict = blamed(program)
    assert verdict.culprit is Culprit.ONNX_RUNTIME
    assert verdict.name == "its optimiser Pad_Fusion (level 'basic')"
    assert verdict.first is not None
    assert verdict.first.operator.startswith("aten::max_pool2d")
    for how in (PLAIN, EVALUATOR, ORT_OFF, ORT_ON):
        result = verdict.walks[how]
        assert isinstance(result, Walk)
        assert result.compared == 4
        assert not result.differences
    right(onnxplug.to_onnx(model, (-torch.rand(1, 1, 6, 6) - 1,)))


def test_a_kernel_of_onnxruntime() -> None:
    program = onnxplug.to_onnx(Call(lambda x: x.sum(1) - 1), (torch.tensor([[2**53, 1]]),), target=None)
    verdict = blamed(program)
    assert (verdict.culprit, verdict.name) == (Culprit.ONNX_RUNTIME, "its kernel of ReduceSum")


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.long
def test_onnxruntime_takes_other_phases_where_it_optimises(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both signs of a pair of singular vectors are right; a change of the sign of only one vector is wrong."""
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    program = onnxplug.to_onnx(Call(lambda x: torch.linalg.svd(x, full_matrices=False)), (x,))
    left, _, other = (output.name for output in program.model.graph.outputs)
    computed = Runs.computed

    def negated(self: Runs, names: Any = (), level: str = "all", *args: Any, **options: Any) -> Any:
        values = computed(self, names, level, *args, **options)
        changed = () if level == "disable" else (left,) if wrong and not names else (left, other)
        return {name: -value if name in changed else value for name, value in values.items()}

    monkeypatch.setattr(Runs, "computed", negated)
    verdict = verdicts.judge_program(program, [x])
    assert verdict.culprit is (Culprit.ONNX_RUNTIME if wrong else Culprit.NOBODY), str(verdict)


def test_a_model_that_onnxruntime_refuses() -> None:
    """A pool whose padding is as wide as its kernel."""
    model = Call(lambda x: nn.functional.max_pool2d(x.exp(), 2, 4, 0, 5, ceil_mode=True).tanh())
    verdict = blamed(onnxplug.to_onnx(model, (torch.rand(1, 1, 20, 20),), target=None))
    assert (verdict.culprit, verdict.name) == (Culprit.ONNX_RUNTIME, "which does not run the model")
    assert verdict.first is not None
    assert verdict.first.operator.startswith("aten::max_pool2d")
    assert "Pad should be smaller than kernel" in str(verdict.first)


def test_a_model_that_nothing_runs() -> None:
    program = onnxplug.to_onnx(Call(lambda x: x.exp().log()), (X,))
    for node in program.model.graph:
        node.op_type = "NoSuchOperator"
    verdict = blamed(program)
    assert verdict.culprit is Culprit.CHANGE
    assert "NoSuchOperator" in str(verdict.walks[EVALUATOR])


def test_the_evaluator_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluated(self: Runs, names: Sequence[str]) -> dict[str, Any]:
        result = self.computed(names, "disable")
        return {name: result[name] + (1 if name == "tanh" else 0) for name in self.known(names)}

    monkeypatch.setattr(verdicts.Runs, "evaluated", evaluated)
    verdict = onnxplug.to_onnx(Layers(), (X,)).verify(intermediates=True).intermediates
    assert (verdict.culprit, verdict.name) == (Culprit.EVALUATOR, "Tanh")


# -- right models: nothing is blamed, and nothing crashes ------------------------------------------------------------------


class Counts(nn.Module):
    """Writes a buffer and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(x.mean(0))
        x.mul_(2)
        return self.norm(x) * self.calls


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))
        return y.exp()


class Steps(nn.Module):
    def forward(self, n: torch.Tensor, x: torch.Tensor) -> Any:
        def more(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return n > 0

        def step(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return n - 1, x * 2

        return torch.ops.higher_order.while_loop(more, step, (n, x), ())


BATCH = ({0: "batch"},)
RIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], Any]] = {
    "mutations": (lambda: Counts().eval(), (torch.randn(4, 3),), BATCH),
    "training": (lambda: Counts().train(), (torch.randn(4, 3),), BATCH),
    "cond": (Branches, (torch.randn(4),), BATCH),
    "while_loop": (Steps, (torch.tensor(3), torch.randn(2)), None),
    "views": (lambda: Call(lambda x: (x.t().reshape(-1)[1:] + 1, x.unsqueeze(0).expand(2, -1, -1) * 2)), (X,), None),
    "strides": (lambda: Call(lambda x: torch.as_strided(x.t().contiguous() * 2, (2, 2), (3, 1)) + 1), (X,), None),
    "sizes": (lambda: Call(lambda x: (x.reshape(x.shape[0] * 2, 2) * x.shape[0], x.shape[0] + 3)), (X,), (BATCH,)),
    "nothing": (lambda: Call(lambda x, k=None: (x, None, 3)), (X,), None),
    "empty": (lambda: Call(lambda x: torch.empty_like(x).copy_(x[:0].sum(0)) + x), (X,), None),
    "undefined": (lambda: Call(lambda x: x.new_empty(3, 4).fill_(2.0).mul(x)), (X,), None),
    "complex": (lambda: Call(lambda x: torch.fft.ifft(torch.fft.fft(x).conj() * 1j).real), (X,), None),
    "nan": (lambda: Call(lambda x: (x.log().nan_to_num() / 0).sqrt() + 1), (X,), None),
    "bfloat16": (lambda: Call(lambda x: (x.bfloat16() @ x.bfloat16().t()).softmax(-1)), (X,), None),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), (X[None],), None),
    "lstm": (lambda: nn.LSTM(4, 5), (X[None],), None),
    "amplified": (lambda: Call(lambda x: ((x * 1e3).sin() * 1e6).sin().round(decimals=3)), (X,), None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_models(name: str) -> None:
    make, args, dynamic = RIGHT[name]
    torch.manual_seed(0)
    program = onnxplug.to_onnx(make(), args, dynamic_shapes=dynamic)
    verdict = right(program, seeds=(0,))
    assert verdict.first is None
    text = str(verdict)
    assert text.startswith("at fault: nothing")


def test_random_operators_are_not_compared() -> None:
    """Operators after them are compared, on the numbers that ONNX drew."""
    program = onnxplug.to_onnx(Call(lambda x: (torch.rand_like(x) + x).tanh()), (X,), rules=[WRONG])
    verdict = verdicts.judge_program(program, [X])
    assert (verdict.culprit, verdict.first and verdict.first.node) == (Culprit.RULE, "tanh")
    plain = verdict.walks[PLAIN]
    assert isinstance(plain, Walk)
    assert plain.skipped == {"random": 1}


def test_a_dropout_that_does_nothing_is_not_random() -> None:
    verdict = right(onnxplug.to_onnx(nn.Sequential(nn.Dropout(), nn.Tanh()).eval(), (X,)))
    plain = verdict.walks[PLAIN]
    assert isinstance(plain, Walk)
    assert "random" not in plain.skipped


@torch.library.custom_op("verdict::misstated", mutates_args=())
def misstated(x: torch.Tensor) -> torch.Tensor:
    return x.float()


@misstated.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_dtype_that_torch_states_otherwise() -> None:
    """The graph states half, and the kernel gives float32."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return (misstated(x) > 0).half() + x

    rule = onnxplug.Rule("verdict::misstated", lambda g, node: g.op.Abs(g.op.Neg(node.args[0])))
    x = torch.rand(4, 3).half()
    verdict = right(onnxplug.to_onnx(model, (x,), rules=[rule]), seeds=())
    plain = verdict.walks[PLAIN]
    assert isinstance(plain, Walk)
    assert "of another dtype than torch's graph states" in plain.skipped


def test_folded_and_rewritten_operators_are_counted() -> None:
    verdict = right(onnxplug.to_onnx(Call(lambda x: x @ (torch.ones(4, 4) * 2) + torch.arange(4)), (X,)))
    result = verdict.walks[EVALUATOR]
    assert isinstance(result, Walk)
    assert result.compared + sum(result.skipped.values()) >= 5
    assert result.skipped


def test_a_capture_that_lost_something() -> None:
    class Counts(nn.Module):
        times = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counts.times += 1
            return x * Counts.times

    verdict = blamed(onnxplug.to_onnx(Counts(), (X,)))
    assert (verdict.culprit, verdict.first) == (Culprit.CAPTURE, None)


def test_a_program_made_by_hand_is_refused() -> None:
    program = onnxplug.to_onnx(Layers(), (X,))
    made = onnxplug.OnnxProgram(program.model, program.exported_program, captured=program.captured)
    with pytest.raises(onnxplug.UsageError, match="that to_onnx made"):
        made.verify(intermediates=True)


def test_without_it_the_report_has_no_verdict() -> None:
    assert onnxplug.to_onnx(Layers(), (X,)).verify(seeds=()).intermediates is None
    with pytest.raises(VerificationError) as caught:
        onnxplug.to_onnx(Layers(), (X,), rules=[WRONG]).verify()
    assert caught.value.verdict is None
    assert "intermediates=True" in str(caught.value)


@pytest.mark.parametrize("move", [
    lambda x: x.t(), lambda x: x.reshape(-1), lambda x: torch.cat([x, x]), lambda x: x.flip(0)[1:].unsqueeze(0),
    lambda x: x.expand(2, 3, 4).contiguous(), lambda x: x.roll(1, 0).gather(0, torch.zeros(1, 4, dtype=torch.int64)),
])  # fmt: skip
def test_an_operator_that_moves_elements_is_not_blamed_for_its_operands(move: Any) -> None:
    """Of two operators in one ONNX node, only the result of the operator that moves elements is known."""

    def unknown(g: Any, node: Any) -> Any:
        """A wrong rule, whose result is unknown below, as if a rewrite had taken both operators."""
        return g.op.Sinh(node.args[0])

    program = onnxplug.to_onnx(Call(lambda x: move(x.tanh())), (X,), rules=[Rule("aten::tanh", unknown)])
    recipe = program.recipe
    assert recipe is not None
    build = recipe.build

    def without_names(functional: Any, optimize: bool, without: Any, alignment: Any) -> Any:
        model = build(functional, optimize, without, alignment)
        if alignment is not None:
            for node in [n for n in alignment.names if n.name == "tanh"]:
                del alignment.names[node]
        return model

    program.recipe = dataclasses.replace(recipe, build=without_names)
    verdict = blamed(program, seeds=())
    assert verdict.first is not None
    assert verdict.first.operator == "aten::tanh.default"
    assert verdict.name.endswith("(for aten::tanh.default)")


def test_a_wrong_rule_of_an_operator_that_moves_elements_is_blamed() -> None:
    other = Rule("aten::flip", lambda g, node: g.op.Identity(g.op.Neg(g.op.Neg(node.args[0]))))
    verdict = blamed(onnxplug.to_onnx(Call(lambda x: x.sin().flip(0)), (X,), rules=[other]))
    assert (verdict.culprit, verdict.first and verdict.first.operator) == (Culprit.RULE, "aten::flip.default")
