"""torchrec's modules and models, with features of any length, against torchrec itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fbgemm_gpu", reason="`make packages` tests with it, in an environment of its own")
pytest.importorskip("torchrec", reason="`make packages` tests with it, in an environment of its own")

import torch
from onnxplug_fbgemm import features_shapes
from torch.ao import quantization
from torch.utils import _pytree as pytree
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from torchrec.inference.modules import quantize_embeddings
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantisedEmbeddingCollection

import onnxplug

ROWS = {"f1": 10, "f2": 5, "f3": 10, "unused": 9}
DENSE = {"dense_in_features": 4, "dense_arch_layer_sizes": [16, 8], "over_arch_layer_sizes": [16, 1]}


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def drawn(
    samples: int,
    *,
    keys: tuple[str, ...] = ("f1", "f2", "f3"),
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
    most: int = 4,
) -> KeyedJaggedTensor:
    lengths = torch.randint(0, most, (len(keys), samples))
    counts = lengths.sum(1).tolist()
    values = torch.cat([torch.randint(0, ROWS[key], (n,)) for key, n in zip(keys, counts, strict=True)]).to(dtype)
    weights = torch.rand(len(values)) if weighted else None
    return KeyedJaggedTensor(keys=list(keys), values=values, lengths=lengths.reshape(-1).to(dtype), weights=weights)


def configurations(kind: Any, **options: Any) -> list[Any]:
    both = [("t1", 10, ["f1", "f3"]), ("t2", 5, ["f2"])]
    return [
        kind(name=name, embedding_dim=8, num_embeddings=rows, feature_names=names, **options)
        for name, rows, names in both
    ]


def bags(weighted: bool = False, **options: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(configurations(EmbeddingBagConfig, **options), is_weighted=weighted)


def check(model: torch.nn.Module, make: Callable[[int], Any]) -> Any:
    """Exports with three samples, and compares on other numbers of samples, and on the first inputs after calls."""
    model.eval()
    args = make(3)
    shapes = tuple(features_shapes(x) if isinstance(x, KeyedJaggedTensor) else {0: "samples"} for x in args)
    program = onnxplug.to_onnx(model, args, dynamic_shapes=shapes)
    for inputs in (args, make(5), make(1), make(2), args):
        expected = [leaf for leaf in pytree.tree_leaves(model(*inputs)) if leaf is not None]
        results = list(program(*inputs))
        assert len(results) == len(expected)
        for result, leaf in zip(results, expected, strict=True):
            torch.testing.assert_close(result, leaf)
    return program


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bags(pooling: PoolingType, dtype: torch.dtype) -> None:
    program = check(bags(pooling=pooling), lambda samples: (drawn(samples, dtype=dtype),))
    assert [value.name for value in program.model.graph.inputs] == ["features__values", "features__lengths"]


def test_weighted_bags() -> None:
    check(bags(weighted=True, pooling=PoolingType.SUM), lambda samples: (drawn(samples, weighted=True),))


def test_tables_of_float16() -> None:
    check(bags(data_type=DataType.FP16), lambda samples: (drawn(samples),))


def test_features_in_another_order_and_more_of_them() -> None:
    check(bags(), lambda samples: (drawn(samples, keys=("f3", "unused", "f1", "f2")),))


def test_no_values() -> None:
    check(bags(), lambda samples: (drawn(samples, most=4 if samples == 3 else 1),))


def test_offsets_instead_of_lengths() -> None:
    """The inputs are the lengths nevertheless."""

    def make(samples: int) -> tuple[KeyedJaggedTensor]:
        inputs = drawn(samples)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), inputs.lengths().cumsum(0)])
        return (KeyedJaggedTensor(keys=inputs.keys(), values=inputs.values(), offsets=offsets),)

    check(bags(), make)


def test_sequences() -> None:
    check(EmbeddingCollection(configurations(EmbeddingConfig)), lambda samples: (drawn(samples),))


class Regrouped(torch.nn.Module):
    def __init__(self, as_dict: bool) -> None:
        super().__init__()
        self.bags, self.groups = bags(), [["f1"], ["f3", "f2"]]
        self.regroup = KTRegroupAsDict(self.groups, ["a", "b"]) if as_dict else None

    def forward(self, features: KeyedJaggedTensor) -> Any:
        pooled = self.bags(features)
        return KeyedTensor.regroup([pooled], self.groups) if self.regroup is None else self.regroup([pooled])


@pytest.mark.parametrize("as_dict", [False, True])
def test_regrouped(as_dict: bool) -> None:
    check(Regrouped(as_dict), lambda samples: (drawn(samples),))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "dlrm": lambda: DLRM(bags(), **DENSE),
    "dcn": lambda: DLRM_DCN(bags(), **DENSE, dcn_num_layers=2, dcn_low_rank_dim=4),
    "projection": lambda: DLRM_Projection(
        bags(), **DENSE, interaction_branch1_layer_sizes=[16, 16], interaction_branch2_layer_sizes=[16, 16]
    ),
    "deepfm": lambda: SimpleDeepFMNN(
        num_dense_features=4, embedding_bag_collection=bags(), hidden_layer_size=16, deep_fm_dimension=5
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    check(MODELS[name](), lambda samples: (torch.randn(samples, 4), drawn(samples)))


class Holder(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.module(features)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.quint2x4], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_quantised_bags(dtype: torch.dtype, weighted: bool) -> None:
    model = quantize_embeddings(Holder(bags(weighted, pooling=PoolingType.SUM)), dtype=dtype, inplace=False)
    program = check(model, lambda samples: (drawn(samples, weighted=weighted),))
    tables = [value for value in program.model.graph.initializers.values() if value.dtype.name == "UINT8"]
    assert len(tables) == 2
    assert not any(list(v.shape) in ([10, 8], [5, 8]) for v in program.model.graph.initializers.values())


def test_quantised_sequences() -> None:
    module: Any = EmbeddingCollection(configurations(EmbeddingConfig))
    module.qconfig = quantization.QConfig(
        activation=quantization.PlaceholderObserver.with_args(dtype=torch.float32),
        weight=quantization.PlaceholderObserver.with_args(dtype=torch.qint8),
    )

    class Values(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = QuantisedEmbeddingCollection.from_float(module)

        def forward(self, features: KeyedJaggedTensor) -> Any:
            return {key: part.values() for key, part in self.module(features).items()}

    check(Values(), lambda samples: (drawn(samples),))


def test_a_quantised_model() -> None:
    """fbgemm quantises the tables; the layers stay in float."""
    model = quantize_embeddings(DLRM(bags(), **DENSE), dtype=torch.qint8, inplace=False)
    before = copy.deepcopy(model.state_dict())
    check(model, lambda samples: (torch.randn(samples, 4), drawn(samples)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
