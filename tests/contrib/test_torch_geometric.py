"""onnxplug-torch-geometric: layers and models of torch_geometric, with any number of nodes, edges and graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import onnxplug
from tests.support.contrib import plugged

pytest.importorskip("torch_geometric", reason="`make` installs it, with the others of the test extra")

import torch_geometric.utils as pyg
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data

from tests.support.tolerances import looser

REGISTRY = plugged("onnxplug-torch-geometric")
NODES, EDGES = {0: "nodes"}, {1: "edges"}
#: Nodes, edges, graphs: the exported sizes first; one of each; no edges.
SIZES = ((6, 10, 3), (1, 1, 1), (9, 20, 4), (5, 0, 2), (30, 7, 3))


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    pass


class Taking(nn.Module):
    """A module (or function) with inputs named by kind: x, edge_index, edge_weight, edge_attr, edge_type, batch."""

    def __init__(self, kinds: str, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.kinds, self.inner = kinds.split(), inner

    def inputs(self, nodes: int, edges: int, graphs: int) -> dict[str, torch.Tensor]:
        graphs = min(nodes, graphs)
        batch = torch.cat([torch.arange(graphs), torch.randint(0, graphs, (nodes - graphs,))]).sort()[0]
        every = {
            "x": torch.randn(nodes, 8),
            "edge_index": torch.randint(0, nodes, (2, edges)),
            "edge_weight": torch.rand(edges),
            "edge_attr": torch.randn(edges, 4),
            "edge_type": torch.randint(0, 3, (edges,)),
            "node_type": torch.randint(0, 3, (nodes,)),
            "batch": batch,
        }
        return {kind: every[kind] for kind in self.kinds}

    def shapes(self) -> dict[str, Any]:
        along = {"x": NODES, "node_type": NODES, "batch": NODES, "edge_index": EDGES}
        return {"inputs": {kind: along.get(kind, {0: "edges"}) for kind in self.kinds}}

    def forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        return self.inner(*(inputs[kind] for kind in self.kinds))


def mlp(inside: int = 8, outside: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(inside, 16), nn.ReLU(), nn.Linear(16, outside))


def pair(conv: Any) -> Taking:
    return Taking("x edge_index", conv)


def weighted(conv: Any) -> Taking:
    return Taking("x edge_index edge_weight", conv)


def attributed(conv: Any) -> Taking:
    return Taking("x edge_index edge_attr", conv)


def graphwise(layer: Any) -> Taking:
    return Taking("x batch", layer)


class Pooled(nn.Module):
    """A pooling layer's nodes, edges and batch."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Any, edge_index: Any, batch: Any) -> Any:
        x, edge_index, _, batch, *_ = self.pool(x, edge_index, None, batch)
        return x, edge_index, batch


class Classifier(nn.Module):
    """What tutorials build: convolutions, a readout, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = gnn.GCNConv(8, 16), gnn.GATv2Conv(16, 8, heads=2), nn.Linear(48, 3)
        self.norm = gnn.GraphNorm(16)

    def forward(self, x: Any, edge_index: Any, batch: Any) -> Any:
        x = self.norm(self.first(x, edge_index).relu(), batch)
        x = self.second(x, edge_index).relu()
        pools = (gnn.global_mean_pool, gnn.global_max_pool, gnn.global_add_pool)
        return self.last(torch.cat([pool(x, batch) for pool in pools], 1)).log_softmax(-1)


class Hetero(nn.Module):
    """Two kinds of nodes, two kinds of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = gnn.HeteroConv(
            {
                ("user", "buys", "item"): gnn.SAGEConv(8, 16),
                ("item", "sold", "user"): gnn.GATConv((8, 8), 16, add_self_loops=False),
            }
        )

    def forward(self, x: Any, edge_index: Any) -> Any:
        edges = {("user", "buys", "item"): edge_index, ("item", "sold", "user"): edge_index.flip(0)}
        return self.convs({"user": x, "item": x * 2}, edges)


DEGREES = torch.tensor([0, 3, 5, 2])

#: Models of every run.
MODELS: dict[str, Callable[[], Taking]] = {
    "GCN": lambda: pair(gnn.GCN(8, 16, 3, 4, norm="batch_norm", jk="cat")),
    "GCN weighted": lambda: weighted(gnn.GCN(8, 16, 2, 4, norm="layer_norm")),
    "GraphSAGE": lambda: pair(gnn.GraphSAGE(8, 16, 3, 4, jk="max")),
    "GIN": lambda: pair(gnn.GIN(8, 16, 3, 4, norm="graph_norm")),
    "GAT": lambda: pair(gnn.GAT(8, 16, 2, 4, heads=4, v2=True, jk="lstm")),
    "TransformerConv": lambda: attributed(gnn.TransformerConv(8, 16, heads=2, edge_dim=4)),
    "EdgeConv": lambda: pair(gnn.EdgeConv(mlp(16), aggr="max")),
    "RGCNConv": lambda: Taking("x edge_index edge_type", gnn.RGCNConv(8, 16, 3)),
    "Classifier": lambda: Taking("x edge_index batch", Classifier()),
    "Hetero": lambda: pair(Hetero()),
    "HeteroLinear": lambda: Taking("x node_type", gnn.HeteroLinear(8, 16, 3)),
    "to_dense_batch": lambda: graphwise(pyg.to_dense_batch),
    "SortAggregation": lambda: graphwise(gnn.SortAggregation(4)),
    "QuantileAggregation": lambda: graphwise(gnn.QuantileAggregation([0.25, 0.7])),
    "MultiAggregation": lambda: graphwise(gnn.MultiAggregation(["min", "std", "softmax", "mul"])),
    "TopKPooling": lambda: Taking("x edge_index batch", Pooled(gnn.TopKPooling(8, 0.5))),
    "coalesce": lambda: attributed(lambda x, e, a: pyg.coalesce(e, a, reduce="mean")),
    "degree": lambda: pair(lambda x, e: pyg.degree(e[0])),
}

#: Models of the long run: each takes a second or less, but they are many.
MORE: dict[str, Callable[[], Taking]] = {
    "SAGEConv lstm": lambda: pair(lambda x, e: LSTM(x, e[:, e[1].sort(stable=True)[1]])),
    "GATConv edges": lambda: attributed(gnn.GATConv(8, 16, heads=2, edge_dim=4)),
    "GATv2Conv edges": lambda: attributed(gnn.GATv2Conv(8, 16, heads=2, edge_dim=4)),
    "GINEConv": lambda: attributed(gnn.GINEConv(mlp(), edge_dim=4)),
    "GraphConv": lambda: weighted(gnn.GraphConv(8, 16)),
    "ChebConv": lambda: pair(gnn.ChebConv(8, 16, 3)),
    "TAGConv": lambda: pair(gnn.TAGConv(8, 16)),
    "SGConv": lambda: pair(gnn.SGConv(8, 16, 2)),
    "APPNP": lambda: pair(gnn.APPNP(3, 0.1)),
    "ARMAConv": lambda: pair(gnn.ARMAConv(8, 16)),
    "GatedGraphConv": lambda: pair(gnn.GatedGraphConv(8, 2)),
    "ResGatedGraphConv": lambda: pair(gnn.ResGatedGraphConv(8, 16)),
    "LEConv": lambda: pair(gnn.LEConv(8, 16)),
    "ClusterGCNConv": lambda: pair(gnn.ClusterGCNConv(8, 16)),
    "GENConv": lambda: pair(gnn.GENConv(8, 16, aggr="powermean")),
    "FiLMConv": lambda: pair(gnn.FiLMConv(8, 16)),
    "SuperGATConv": lambda: pair(gnn.SuperGATConv(8, 16)),
    "PNAConv": lambda: pair(gnn.PNAConv(8, 16, ["mean", "min", "max", "std"], ["identity", "amplification"], DEGREES)),
    "FastRGCNConv": lambda: Taking("x edge_index edge_type", gnn.FastRGCNConv(8, 16, 3)),
    "RGATConv": lambda: Taking("x edge_index edge_type", gnn.RGATConv(8, 16, 3)),
    "NNConv": lambda: attributed(gnn.NNConv(8, 16, mlp(4, 128))),
    "CGConv": lambda: attributed(gnn.CGConv(8, 4)),
    "GMMConv": lambda: attributed(gnn.GMMConv(8, 16, 4, 2)),
    "GPSConv": lambda: Taking("x edge_index batch", gnn.GPSConv(8, gnn.GINConv(mlp()), heads=2)),
    "PointNetConv": lambda: pair(lambda x, e: POINTS(x, x[:, :3], e)),
    "DirGNNConv": lambda: pair(gnn.DirGNNConv(gnn.SAGEConv(8, 16))),
    "MFConv": lambda: pair(gnn.MFConv(8, 16)),
    "EGConv": lambda: pair(gnn.EGConv(8, 16)),
    "AGNNConv": lambda: pair(gnn.AGNNConv()),
    "LayerNorm": lambda: graphwise(gnn.LayerNorm(8)),
    "InstanceNorm": lambda: graphwise(gnn.InstanceNorm(8)),
    "PairNorm": lambda: graphwise(gnn.PairNorm()),
    "GraphSizeNorm": lambda: graphwise(gnn.GraphSizeNorm()),
    "MeanSubtractionNorm": lambda: graphwise(gnn.MeanSubtractionNorm()),
    "Set2Set": lambda: graphwise(gnn.Set2Set(8, 2)),
    "SAGPooling": lambda: Taking("x edge_index batch", Pooled(gnn.SAGPooling(8, 0.5))),
    "AttentionalAggregation": lambda: graphwise(gnn.AttentionalAggregation(nn.Linear(8, 1))),
    "SoftmaxAggregation": lambda: graphwise(gnn.SoftmaxAggregation(learn=True)),
    "MedianAggregation": lambda: graphwise(gnn.MedianAggregation()),
    "PowerMeanAggregation": lambda: graphwise(gnn.PowerMeanAggregation()),
    "DeepSetsAggregation": lambda: graphwise(gnn.DeepSetsAggregation(mlp(), mlp())),
    "GraphMultisetTransformer": lambda: graphwise(gnn.GraphMultisetTransformer(8, k=3, heads=2)),
    "SetTransformerAggregation": lambda: graphwise(gnn.SetTransformerAggregation(8, heads=2)),
    "GRUAggregation": lambda: graphwise(gnn.GRUAggregation(8, 8)),
    "LSTMAggregation": lambda: graphwise(gnn.LSTMAggregation(8, 8)),
    "PNA": lambda: pair(gnn.PNA(8, 16, 2, 4, aggregators=["mean", "max"], scalers=["identity"], deg=DEGREES)),
    "EdgeCNN": lambda: pair(gnn.EdgeCNN(8, 16, 2, 4)),
    "GraphUNet": lambda: pair(gnn.GraphUNet(8, 16, 4, 2)),
    "AttentiveFP": lambda: Taking("x edge_index edge_attr batch", gnn.AttentiveFP(8, 16, 4, 4, 2, 2)),
    "LabelPropagation": lambda: pair(lambda x, e: gnn.LabelPropagation(2, 0.5)(x, e)),
    "to_dense_adj": lambda: Taking("edge_index batch", pyg.to_dense_adj),
    "to_dense_adj of one graph": lambda: Taking(
        "edge_index edge_attr", lambda e, a: (pyg.to_dense_adj(e, edge_attr=a), pyg.to_dense_adj(e, batch_size=2))
    ),
    # PyTorch leaves the order of equal edges open: equal edges have equal attributes here.
    "sort_edge_index": lambda: Taking(
        "edge_index", lambda e: (pyg.sort_edge_index(e, e[0] - e[1]), pyg.sort_edge_index(e, sort_by_row=False))
    ),
    "to_undirected": lambda: pair(lambda x, e: pyg.to_undirected(e)),
    "subgraph": lambda: pair(lambda x, e: pyg.subgraph(x[:, 0] > 0, e, relabel_nodes=True, num_nodes=x.size(0))[0]),
    "cumsum": lambda: Taking("edge_type", lambda kind: (pyg.cumsum(kind.int()), pyg.cumsum(kind))),
    "softmax of runs": lambda: Taking("x", lambda x: pyg.softmax(x, ptr=torch.tensor([0, 1]) * x.size(0))),
    "coalesce edges": lambda: attributed(lambda x, e, a: pyg.coalesce(e, [a, a * 2], x.size(0), sort_by_row=False)),
}
LSTM = gnn.SAGEConv(8, 16, aggr="lstm")
POINTS = gnn.PointNetConv(mlp(11, 16), mlp(16, 16))


def verify(model: Taking, opset: int | None = None, sizes: Any = SIZES) -> onnxplug.OnnxProgram:
    """Exports at the first sizes, and compares with eager PyTorch at all sizes."""
    model.eval()
    example = model.inputs(*SIZES[0])
    with torch.no_grad():
        model(example)  # the first call makes lazy parts
    program = onnxplug.to_onnx(model, (example,), dynamic_shapes=model.shapes(), opset_version=opset, registry=REGISTRY)
    for size in sizes:
        inputs = model.inputs(*size)
        with torch.no_grad():
            expected = _pytree.tree_leaves(copy.deepcopy(model)(copy.deepcopy(inputs)))
        got = program(inputs)
        assert len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            text = f"at {size} nodes, edges, graphs: "
            torch.testing.assert_close(
                mine, theirs, **looser("graphs"), equal_nan=True, msg=lambda m, text=text: text + m
            )
    return program


OF_COUNTED_GRAPHS = pytest.mark.xfail(
    torch.__version__.startswith("2.9."),
    strict=True,
    reason="torch 2.9 asks whether a softmax, a slice or an expansion of as many rows as data has graphs is empty",
)


def marked(models: Iterable[str]) -> list[Any]:
    """The names of models, with a mark at the models that torch 2.9 does not trace."""
    return [
        pytest.param(name, marks=OF_COUNTED_GRAPHS if name in ("Classifier", "to_dense_batch", "SAGPooling") else ())
        for name in models
    ]


@pytest.mark.parametrize("name", marked(MODELS))
def test_model(name: str) -> None:
    verify(MODELS[name]())


@pytest.mark.long
@pytest.mark.parametrize("name", marked(MORE))
def test_more_models(name: str) -> None:
    # torch's own LSTM takes no sequence without steps.
    verify(MORE[name](), sizes=[size for size in SIZES if size[1] or "lstm" not in name])


@pytest.mark.parametrize("opset", [13, 16, 23])
@OF_COUNTED_GRAPHS
def test_other_opsets(opset: int) -> None:
    """Scatter operators have reductions since opsets 16 and 18."""
    assert verify(MODELS["Classifier"](), opset).model.opset_imports[""] == opset


class OfData(nn.Module):
    """A forward as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = gnn.GINEConv(mlp(), edge_dim=4), nn.Linear(8, 3)

    def forward(self, data: Any) -> Any:
        x = self.conv(data.x, data.edge_index, data.edge_attr).relu()
        return self.last(gnn.global_mean_pool(x, data.batch))


def graph(nodes: int, edges: int) -> Data:
    index = torch.randint(0, nodes, (2, edges))
    return Data(x=torch.randn(nodes, 8), edge_index=index, edge_attr=torch.randn(edges, 4), y=torch.tensor([1]))


def test_batches_as_inputs() -> None:
    from onnxplug_torch_geometric import data_shapes

    model = OfData().eval()
    example = Batch.from_data_list([graph(3, 5), graph(4, 2)])
    shapes = data_shapes(example)
    assert shapes[:3] == [{0: "nodes"}, {0: "edges"}, {1: "edges"}]
    program = onnxplug.to_onnx(model, (example,), dynamic_shapes=(shapes,), registry=REGISTRY)
    names = [value.name for value in program.model.graph.inputs]
    assert names == [f"data_{name}" for name in ("batch", "edge_attr", "edge_index", "ptr", "x", "y")]
    for sizes in ([(3, 5), (4, 2)], [(1, 1)], [(2, 0), (7, 9), (1, 3)]):
        inputs = Batch.from_data_list([graph(*size) for size in sizes])
        torch.testing.assert_close(program(inputs)[0], model(inputs))
        assert program(inputs)[0].shape == (len(sizes), 3)


def test_a_stored_number_of_nodes_is_not_a_constant() -> None:
    """Data sets such as OGB's store it beside the tensors of nodes."""
    from onnxplug_torch_geometric import data_shapes

    class Model(nn.Module):
        def forward(self, data: Any) -> Any:
            return data.x / data.num_nodes

    def numbered(nodes: int) -> Data:
        data = graph(nodes, 4)
        data.num_nodes = nodes
        return data

    for examples in ([numbered(n) for n in (3, 1, 6)], [Batch.from_data_list([numbered(n)] * n) for n in (3, 2)]):
        shapes = (data_shapes(examples[0]),)
        program = onnxplug.to_onnx(Model(), (examples[0],), dynamic_shapes=shapes, registry=REGISTRY)
        for inputs in examples:
            torch.testing.assert_close(program(inputs)[0], Model()(inputs))


def test_one_graph_as_input() -> None:
    from onnxplug_torch_geometric import data_shapes

    model, example = OfData().eval(), graph(3, 5)
    program = onnxplug.to_onnx(model, (example,), dynamic_shapes=(data_shapes(example),), registry=REGISTRY)
    for inputs in (example, graph(1, 1), graph(6, 0)):
        torch.testing.assert_close(program(inputs)[0], model(inputs))
    example.words = ["a", "b"]
    with pytest.raises(TypeError, match="'words' of the Data has the type list"):
        data_shapes(example)
    with pytest.raises(TypeError, match="a Data or a Batch of them, got Tensor"):
        data_shapes(torch.ones(2))


@OF_COUNTED_GRAPHS
def test_torch_geometric_is_put_back() -> None:
    from torch_geometric.utils import _to_dense_batch

    watched = (pyg.cumsum, pyg.scatter, pyg.to_dense_batch, pyg.coalesce, gnn.Aggregation.__call__)
    verify(MODELS["to_dense_batch"]())
    assert (pyg.cumsum, pyg.scatter, pyg.to_dense_batch, pyg.coalesce, gnn.Aggregation.__call__) == watched
    assert "int" not in vars(_to_dense_batch)
    with pytest.raises(ValueError, match="not sorted"):
        gnn.LSTMAggregation(8, 8)(torch.randn(3, 8), torch.tensor([1, 0, 1]))


@OF_COUNTED_GRAPHS
def test_a_declared_dimension_is_not_static() -> None:
    program = verify(MODELS["Classifier"]())
    shapes = {value.name: [str(d) for d in value.shape] for value in program.model.graph.inputs}
    assert [d for shape in shapes.values() for d in shape] == ["nodes", "8", "2", "edges", "nodes"]
