"""Tables, quantised or trained, against fbgemm's own modules on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("fbgemm_gpu", reason="`make packages` tests with it, in an environment of its own")

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from onnxplug_fbgemm import LOOKUPS

import onnxplug

#: Results in halves are rounded once from float32; sums are in another order than fbgemm's.
TOLERANCES = {
    SparseType.FP32: {"rtol": 1e-5, "atol": 1e-5},
    SparseType.FP16: {"rtol": 2e-3, "atol": 2e-3},
    SparseType.BF16: {"rtol": 1e-2, "atol": 1e-2},
}
KINDS = [SparseType.INT8, SparseType.INT4, SparseType.INT2, SparseType.FP16, SparseType.FP32]
ROWS, OFFSETS = {0: "indices"}, {0: "offsets"}
#: Feature to table: the first table has two features.
FEATURES = [0, 1, 0]


@pytest.fixture(autouse=True)
def _seeded() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def tables(kinds: list[SparseType], mode: PoolingMode, features: list[int] = FEATURES, **options: Any) -> Any:
    """Tables of 10 and 5 rows, filled with random numbers."""
    widths = (16, 16 if mode is PoolingMode.NONE else 12)
    options = {"output_dtype": SparseType.FP32, "bounds_check_mode": BoundsCheckMode.NONE} | options
    layer = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (name, rows, width, kind, EmbeddingLocation.HOST)
            for name, rows, width, kind in zip("ab", (10, 5), widths, kinds, strict=True)
        ],
        feature_table_map=features,
        pooling_mode=mode,
        device="cpu",
        **options,
    )
    layer.fill_random_weights()
    for kind, (levels, factors) in zip(kinds, layer.split_embedding_weights(), strict=True):
        if factors is not None:
            pairs = torch.stack([torch.rand(len(factors)) * 0.1 - 0.03, torch.randn(len(factors))], 1)
            factors.copy_(pairs.half().view(torch.uint8))
        else:
            dtype = kind.as_dtype()
            levels.copy_(torch.randn(len(levels), levels.shape[1] // dtype.itemsize).to(dtype).view(torch.uint8))
    return layer


def drawn(
    samples: int, *, weighted: bool = False, index: torch.dtype = torch.int64, most: int = 4, most_rows: int = 10
) -> tuple[Any, ...]:
    """Indices of three features, and the offsets of their bags, some of them empty."""
    lengths = torch.randint(0, most, (3, samples))
    lengths[0, 0] = 0
    counts = lengths.sum(1).tolist()
    indices = torch.cat(
        [torch.randint(0, min(rows, most_rows), (n,)) for rows, n in zip((10, 5, 10), counts, strict=True)]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    return indices.to(index), offsets.to(index), *([torch.rand(len(indices))] if weighted else [])


def check(
    onnx_check: Callable[..., Any],
    layer: Any,
    *,
    weighted: bool = False,
    index: Any = torch.int64,
    most_rows: int = 10,
    **options: Any,
) -> Any:
    inputs = [drawn(samples, weighted=weighted, index=index, most_rows=most_rows) for samples in (3, 1, 5)]
    inputs.append(drawn(2, weighted=weighted, index=index, most=1, most_rows=most_rows))
    shapes = (ROWS, OFFSETS, *([ROWS] if weighted else []))
    return onnx_check(layer, inputs[0], inputs=inputs[1:], dynamic_shapes=shapes, seeds=(), **options)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("mode", "weighted"),
    [
        (PoolingMode.SUM, False),
        (PoolingMode.SUM, True),
        (PoolingMode.MEAN, False),
        (PoolingMode.MEAN, True),
        (PoolingMode.NONE, False),
    ],
)
def test_pooling(onnx_check: Callable[..., Any], kind: SparseType, mode: PoolingMode, weighted: bool) -> None:
    layer = tables([kind, kind], mode)
    program = check(onnx_check, layer, weighted=weighted, **TOLERANCES[SparseType.FP32])
    kinds = {value.dtype.name for value in program.model.graph.initializers.values() if ".table_" in (value.name or "")}
    assert kinds == {{SparseType.FP16: "FLOAT16", SparseType.FP32: "FLOAT"}.get(kind, "UINT8")}


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("output", [SparseType.FP16, SparseType.BF16], ids=str)
def test_tables_of_several_kinds(onnx_check: Callable[..., Any], output: SparseType, index: torch.dtype) -> None:
    layer = tables([SparseType.INT4, SparseType.FP16], PoolingMode.SUM, output_dtype=output)
    check(onnx_check, layer, index=index, target="onnxruntime:cpu", opsets=(21, 13), **TOLERANCES[output])


def test_bytes_stay_as_they_are(tmp_path: Any) -> None:
    layer = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("a", 50_000, 32, SparseType.INT4, EmbeddingLocation.HOST)], device="cpu", output_dtype=SparseType.FP32
    )
    layer.fill_random_weights()
    program = onnxplug.to_onnx(
        layer, (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])), dynamic_shapes=(ROWS, OFFSETS)
    )
    program.save(tmp_path / "model.onnx", external_data=False)
    (stored,) = [value for value in program.model.graph.initializers.values() if value.dtype.name == "UINT8"]
    assert stored.shape[1] == 20
    assert (
        tmp_path / "model.onnx"
    ).stat().st_size < layer.weights_host.numel() + 50_000  # the graph and its source lines


@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE], ids=str)
def test_indices_that_a_table_lacks(mode: BoundsCheckMode) -> None:
    """Indices outside of a table become 0, as in fbgemm, and the program has no second result."""
    layer = tables([SparseType.INT8, SparseType.INT8], PoolingMode.SUM, bounds_check_mode=mode)
    program = onnxplug.to_onnx(layer, drawn(2), dynamic_shapes=(ROWS, OFFSETS))
    indices = torch.tensor([3, 12, 7, 4, 5, 9, -5])
    offsets = torch.tensor([0, 2, 3, 4, 5, 6, 7])
    torch.testing.assert_close(
        program(indices, offsets)[0], layer(indices.clone(), offsets), **TOLERANCES[SparseType.FP32]
    )
    assert len(program.model.graph.outputs) == 1


def test_pruned_rows(onnx_check: Callable[..., Any]) -> None:
    """Indices remapped by an array; pruned rows are left out."""
    layer = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("a", 4, 16, SparseType.INT8, EmbeddingLocation.HOST), ("b", 5, 8, SparseType.INT8, EmbeddingLocation.HOST)],
        index_remapping=[torch.tensor([0, -1, 1, 2, -1, 3, -1, -1, -1, -1], dtype=torch.int32), None],
        feature_table_map=FEATURES,
        use_array_for_index_remapping=True,
        output_dtype=SparseType.FP32,
        device="cpu",
    )
    layer.fill_random_weights()
    check(onnx_check, layer, index=torch.int32, **TOLERANCES[SparseType.FP32])


def test_unknown_operators() -> None:
    layer = tables([SparseType.INT8, SparseType.INT8], PoolingMode.SUM, output_dtype=SparseType.INT8)
    with pytest.raises(onnxplug.OnnxplugError, match="results of fbgemm's element type 2"):
        onnxplug.to_onnx(layer, drawn(2))


# -- tables that are trained -------------------------------------------------------------------------------------------


def trained(mode: PoolingMode, optimizer: EmbOptimType = EmbOptimType.EXACT_SGD, **options: Any) -> Any:
    """Tables of 10 and 5 rows, the first of two features."""
    widths = (16, 16 if mode is PoolingMode.NONE else 12)
    layer = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, width in zip((10, 5), widths, strict=True)],
        feature_table_map=[0, 0, 1],
        optimizer=optimizer,
        pooling_mode=mode,
        device="cpu",
        **options,
    )
    layer.init_embedding_weights_uniform(-1.0, 1.0)
    return layer.eval()


@pytest.mark.parametrize(
    ("mode", "weighted"),
    [
        (PoolingMode.SUM, False),
        (PoolingMode.SUM, True),
        (PoolingMode.MEAN, False),
        (PoolingMode.MEAN, True),
        (PoolingMode.NONE, False),
    ],
)
def test_trained(onnx_check: Callable[..., Any], mode: PoolingMode, weighted: bool) -> None:
    check(onnx_check, trained(mode), weighted=weighted, most_rows=5, **TOLERANCES[SparseType.FP32])


def test_trained_in_float16(onnx_check: Callable[..., Any]) -> None:
    layer = trained(PoolingMode.SUM, weights_precision=SparseType.FP16, output_dtype=SparseType.FP16)
    check(onnx_check, layer, most_rows=5, **TOLERANCES[SparseType.FP16])


@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD], ids=str)
def test_counters_of_training(onnx_check: Callable[..., Any], optimizer: EmbOptimType) -> None:
    """The counter is no result of the model, and the export doesn't change it."""
    layer = trained(PoolingMode.SUM, optimizer)
    program = onnxplug.to_onnx(layer, drawn(3, most_rows=5), dynamic_shapes=(ROWS, OFFSETS))
    assert layer.iter.item() == 0
    assert len(program.model.graph.outputs) == 1
    check(onnx_check, layer, most_rows=5, **TOLERANCES[SparseType.FP32])


def test_dense_tables(onnx_check: Callable[..., Any]) -> None:
    layer = DenseTableBatchedEmbeddingBagsCodegen([(10, 16), (5, 8)], feature_table_map=[0, 0, 1], use_cpu=True).eval()
    check(onnx_check, layer, most_rows=5, **TOLERANCES[SparseType.FP32])


def test_the_arguments_of_each_optimizer() -> None:
    """The arguments of the look-up without an optimizer have the same names in every optimizer's look-up."""
    for name in LOOKUPS:
        names = {argument.name for argument in getattr(torch.ops.fbgemm, name).default._schema.arguments}
        assert {"D_offsets", "total_D", "max_D", "hash_size_cumsum", "indices", "offsets", "pooling_mode"} <= names
        assert {"indice_weights", "output_dtype"} <= names
        assert names & {"weights", "host_weights", "dev_weights"}
        assert "weights" in names or "weights_offsets" in names
