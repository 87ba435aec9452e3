"""Initializers and the state_dict: equal names are equal tensors, and new weights reach their initializers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import onnxplug
from onnxplug import UsageError
from onnxplug.build.dtypes import as_array
from onnxplug.verification.compare import compare
from tests.support.sampling import rotated
from tests.support.zoo import ZOO

MODELS = ("bert", "vit", "resnet18", "gpt2", "llama", "t5")


def stored(program: onnxplug.OnnxProgram) -> dict[str, np.ndarray]:
    return {name: v.const_value.numpy() for name, v in program.model.graph.initializers.items()}


def check_names(program: onnxplug.OnnxProgram, module: nn.Module) -> None:
    """Every initializer with a name of the state_dict has its tensor's shape, dtype and bits."""
    state = module.state_dict()
    for name, array in stored(program).items():
        if name in state:
            expected = as_array(state[name])
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype), name
            assert array.tobytes() == np.ascontiguousarray(expected).tobytes(), name


def randomized(module: nn.Module) -> nn.Module:
    """A copy with other weights."""
    module = copy.deepcopy(module)
    torch.manual_seed(5)
    with torch.no_grad():
        for tensor in {id(p): p for p in module.parameters()}.values():
            tensor.copy_(tensor + torch.randn_like(tensor) * 0.05)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and name in module.state_dict():
                buffer.copy_(buffer + torch.rand_like(buffer) * 0.05)
    return module


def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Compares names, then the results with other weights with eager PyTorch; returns the program."""
    kwargs = kwargs or {}
    program = onnxplug.to_onnx(module, args, kwargs=kwargs, verify=True, **settings)
    check_names(program, module)
    before = program(*args, **kwargs)
    other = randomized(module)
    program.apply_weights(other.state_dict())
    check_names(program, other)
    with torch.no_grad():
        expected = tree_leaves(other(*args, **kwargs))
    results = program(*args, **kwargs)
    for result, wanted in zip(results, [t for t in expected if isinstance(t, torch.Tensor)], strict=False):
        compared = compare(result, wanted)
        assert compared.equal, compared
    assert any(not torch.equal(a, b) for a, b in zip(before, results, strict=True)), "the new weights make a difference"
    return program


@pytest.mark.parametrize("name", rotated(MODELS, every=3))
def test_whole_models(name: str) -> None:
    case = ZOO[name]()
    check(case.module, case.args, case.kwargs, dynamic_shapes=case.dynamic_shapes)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(4, dtype=torch.complex64))
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x * self.frequencies).sum(-1) @ self.weight


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(3, 5), torch.randn(2, 3)),
        (nn.Linear(4, 4), torch.randn(2, 3, 4)),
        (nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 3, 4)),
        (nn.GRU(4, 5), torch.randn(2, 3, 4)),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)), torch.randn(1, 2, 4, 4)),
        (nn.ConvTranspose1d(2, 3, 2), torch.randn(1, 2, 4)),
        (nn.Bilinear(3, 3, 2), torch.randn(2, 3)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)),
        (nn.Linear(4, 4, dtype=torch.bfloat16), torch.randn(2, 3, 4).bfloat16()),
        (Complex(), torch.randn(2, 4)),
    ],
    ids=lambda p: type(p).__name__,
)
@pytest.mark.parametrize("optimize", [True, False])
def test_layers(module: nn.Module, x: torch.Tensor, optimize: bool) -> None:
    args = (x, x) if isinstance(module, nn.Bilinear) else (x,)
    if x.dtype is torch.bfloat16:
        program = onnxplug.to_onnx(module, args, optimize=optimize)
        check_names(program, module)
        other = randomized(module)
        program.apply_weights(other.state_dict())
        check_names(program, other)
    else:
        check(module.eval(), args, optimize=optimize)


def test_a_transposed_weight_has_a_name_that_says_so() -> None:
    program = onnxplug.to_onnx(nn.Sequential(nn.Linear(4, 4, bias=False)), (torch.randn(2, 3, 4),))
    assert "0.weight.transposed" in stored(program)
    assert "0.weight" not in stored(program)
    assert "frequencies.view_as_real" in stored(onnxplug.to_onnx(Complex(), (torch.randn(2, 4),)))


class Clash(nn.Module):
    """A parameter called as another one's transpose would be, and one called as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.ParameterDict(
            {"transposed": nn.Parameter(torch.randn(4)), "plain": nn.Parameter(torch.ones(4))}
        )
        self.x = nn.Parameter(torch.randn(4))
        self.x_1 = nn.Parameter(torch.randn(4))
        self.constant_1 = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.x) * self.x_1 + self.weight["transposed"] + self.constant_1 * torch.tensor([1.5, 2, 3, 4])


def test_names_that_clash() -> None:
    check(Clash(), (torch.randn(2, 4),))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("matrix", nn.Parameter(torch.randn(4, 4)))
            self.matrix_of = nn.ParameterDict({"transposed": nn.Parameter(torch.randn(4))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.matrix) + self.matrix_of["transposed"]

    check(Outer(), (torch.randn(2, 3, 4),), input_names=["matrix"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.unread = nn.Parameter(torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tied_buffer_is_missed_where_one_of_its_names_is_persistent(is_first: bool) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = torch.randn(3)
            self.register_buffer("a", shared, persistent=is_first)
            self.register_buffer("b", shared, persistent=not is_first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.a + self.b

    program = onnxplug.to_onnx(Tied(), (torch.randn(2, 3),))
    with pytest.raises(onnxplug.WeightsError, match="a"):
        program.apply_weights({}, strict=True)
    new = torch.randn(3)
    program.apply_weights({"a": new}, strict=True)
    for x in (torch.randn(2, 3), torch.zeros(2, 3)):
        torch.testing.assert_close(program(x)[0], x * new + new)


def test_tied_weights(recwarn: pytest.WarningsRecorder) -> None:
    ids, other = torch.tensor([[1, 2]]), Tied()
    program = check(Tied(), (ids,))
    program.apply_weights({"head.weight": other.head.weight})
    torch.testing.assert_close(program(ids)[0], other(ids))
    assert not [w for w in recwarn if "not found" in str(w.message)]
    state = dict(other.state_dict())
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(UsageError, match="one tensor in the exported model"):
        program.apply_weights(state)
    torch.testing.assert_close(program(ids)[0], other(ids)), "nothing was replaced"
    with pytest.warns(Warning, match="'nowhere' not found"):
        program.apply_weights({"nowhere": torch.zeros(1)})


def test_weights_that_do_not_fit() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(2, 3, 4)
    program = onnxplug.to_onnx(module, (x,))
    before = program(x)[0]
    with pytest.raises(UsageError, match=r"'1.weight' has the shape \[2, 4\], got \[4, 2\]"):
        program.apply_weights({"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(4, 2)})
    torch.testing.assert_close(program(x)[0], before, rtol=0, atol=0)
    module.load_state_dict(other := {n: t.double() + 1 for n, t in module.state_dict().items()})
    program.apply_weights(other)
    torch.testing.assert_close(program(x)[0], module(x).detach())


def test_weights_that_optimize_has_computed_with() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.a + self.b.exp()

    module, x = Model(), torch.randn(2, 4)
    program = onnxplug.to_onnx(module, (x,))
    program.optimize()
    other = randomized(module)
    with pytest.raises(UsageError, match=r"'b' can't be replaced: optimize\(\) has computed with it"):
        program.apply_weights(other.state_dict())
    torch.testing.assert_close(program(x)[0], module(x).detach())
    program.apply_weights({"a": other.a})
    torch.testing.assert_close(program(x)[0], (x * other.a + module.b.exp()).detach())


def test_a_weight_can_be_derived_from_a_weight_only() -> None:
    def relu(g: Any, node: Any) -> Any:
        return g.derive(node.args[0], lambda tensor: tensor, "copy")

    with pytest.raises(onnxplug.UsageError, match=r"aten::relu.default.*takes a parameter, a buffer or a constant"):
        onnxplug.to_onnx(torch.nn.ReLU(), (torch.randn(3),), rules=[onnxplug.Rule("aten::relu", relu)])


@pytest.mark.parametrize("name", rotated(MODELS, every=6))
@pytest.mark.long
def test_whole_models_that_get_their_weights_later(name: str, tmp_path: Path) -> None:
    """A model on the device meta gets its weights from a file, and agrees with eager; its graph is the real model's."""
    case = ZOO[name]()
    real = randomized(case.module)
    tensors = (*case.module.parameters(), *case.module.buffers())
    on_meta = {id(t): nn.Parameter(t.to("meta")) if isinstance(t, nn.Parameter) else t.to("meta") for t in tensors}
    fake = copy.deepcopy(case.module, on_meta)  # not .to("meta"), which splits a tied weight into two tensors
    program = onnxplug.to_onnx(fake, case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes)
    plain = onnxplug.to_onnx(case.module, case.args, kwargs=case.kwargs, dynamic_shapes=case.dynamic_shapes)
    assert [node.op_type for node in program.model.graph] == [node.op_type for node in plain.model.graph]
    computed = {n: b for n, b in real.named_buffers() if n not in real.state_dict()}
    program.apply_weights(computed)
    torch.save(real.state_dict(), tmp_path / "weights.pt")
    program.apply_weights(tmp_path / "weights.pt")
    with torch.no_grad():
        expected = tree_leaves(real(*case.args, **case.kwargs))
    results = program(*case.args, **case.kwargs)
    for result, wanted in zip(results, [t for t in expected if isinstance(t, torch.Tensor)], strict=False):
        compared = compare(result, wanted)
        assert compared.equal, compared


class Shared(nn.Module):
    """A weight that the program shares with the model, weights stored in other forms, and weights that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.conv(x)).mean((2, 3))) * self.scale


def trained(module: nn.Module, x: torch.Tensor) -> None:
    module.requires_grad_()
    module(x).square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.01).step()


def reloaded(module: nn.Module, x: torch.Tensor) -> None:
    module.load_state_dict(randomized(module).state_dict())


@pytest.mark.parametrize("write", [trained, reloaded])
def test_a_model_that_is_trained_after_its_export(write: Any, tmp_path: Path) -> None:
    module, x, path = Shared().eval(), torch.randn(2, 3, 8, 8), tmp_path / "model.onnx"
    program = onnxplug.export(module, (x,))
    unrun = onnxplug.export(module, (x,))
    before = program(x)[0]
    write(module, x)
    torch.testing.assert_close(program(x)[0], before)  # the session has the weights of the export
    for use in (lambda: program.save(path), lambda: program.model_proto, lambda: unrun(x), unrun.verify):
        with pytest.raises(onnxplug.WeightsError, match="was written after the export"):
            use()
    assert not list(tmp_path.iterdir())
    program.save(path, weights=module.state_dict())
    program.apply_weights(module.state_dict())
    torch.testing.assert_close(program(x)[0], module(x).detach())
    program.verify()


def test_a_copy_of_a_model_that_was_trained_before() -> None:
    module, x = Shared().eval(), torch.randn(2, 3, 8, 8)
    trained(module, x)
    program = onnxplug.export(module, (x,))
    before, copied = {name: array.copy() for name, array in stored(program).items()}, copy.deepcopy(program.model)
    trained(module, x)
    for name, value in copied.graph.initializers.items():
        np.testing.assert_array_equal(value.const_value.numpy(), before[name])


def test_a_large_copy_of_a_trained_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxplug.build import stored as place

    monkeypatch.setattr(place, "_LARGE_COPY_BYTES", 16)  # so that copies are made when they are needed
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 8, 8)
    program = onnxplug.export(module, (x,))
    trained(module, x)
    with pytest.raises(onnxplug.WeightsError, match="was written after the export"):
        program(x)
    program.apply_weights(module.state_dict())
    torch.testing.assert_close(program(x)[0], module(x).detach())
    trained(module, x)  # the tensors that the program was given
    program.release()
    with pytest.raises(onnxplug.WeightsError, match="was written after the export"):
        program(x)


def test_verify_of_weights_that_the_model_does_not_have() -> None:
    module, x = Shared().eval(), torch.randn(2, 3, 8, 8)
    program, other = onnxplug.export(module, (x,)), randomized(module)
    program.apply_weights({"scale": other.scale})
    with pytest.raises(
        onnxplug.VerificationError, match="other weights than the PyTorch model has, 'scale' for example"
    ):
        program.verify()
    program.apply_weights(module.state_dict())
    program.verify()
