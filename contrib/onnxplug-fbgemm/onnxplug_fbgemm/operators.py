"""The operators that fbgemm registers for the CPU, each with its translation or the reason why it has none.

``python -m onnxplug_fbgemm.operators README.md`` writes the table in README between the two lines that mark it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import fbgemm_gpu

from onnxplug.torch_private import DispatchKey, has_kernel_for_dispatch_key, registered_operators
from onnxplug_fbgemm import CONVERTERS, FUNCTIONS, TRACED

BEGIN, END = "<!-- operators -->", "<!-- end of operators -->"
#: The purpose of the operators of each module of functions and converters.
FAMILIES = {
    "jagged": "jagged tensors",
    "sparse": "sparse features: running sums, ranges, permutations, buckets",
    "pooled": "pooled embeddings, calibration, what a table is given",
    "tables": "tables of embeddings, quantised or not, with any optimizer",
}
#: Why other operators aren't translated, by patterns of their names; the first match counts.
REASONS = {
    "a step of training": (
        ".*_pt2_wrapper",
        ".*_vbe_.*",
        "generate_vbe_metadata",
        "get_infos_metadata",
        "ssd_.*",
        "split_embedding.*",
    ),
    "makes quantised weights, or messages between processes": (
        "Float.*To.*Quantized.*",
        "HalfTo.*",
        "F?P?H?B?f?.*QuantizedToFloat.*",
        "Fused.*",
        "embedding_bag_rowwise_prune",
    ),
    "cache between the memories of a processor and a device": (
        ".*cache.*",
        ".*uvm.*",
        "new_.*",
        "lru_.*",
        "lfu_.*",
    ),
    "changes or makes a hash table of indices": (".*hash.*", "create_zch_buffer"),
    "statistics of data": ("tbe_.*distribution", "get_unique_indices.*", "bottom_k_per_row", "check_feature_gate_key"),
    "inner function of another operator, or writes to an argument": (
        ".*_impl",
        "batch_index_select_dim0_tensor",
        "jagged_slice_forward",
        "kt_regroup_arguments",
        "permute_multi_embedding_function",
        ".*_preallocated_out",
        "lengths_range_out",
    ),
}
_KEYS = ("CPU", "AutogradCPU", "Autograd", "CompositeImplicitAutograd", "CompositeExplicitAutograd")


def registered() -> list[str]:
    """Every operator of fbgemm with a kernel for the CPU, without the operators for gradients."""
    names = {name for name in registered_operators() if name.startswith("fbgemm::")}
    names = {name for name in names if not re.search("backward|grad_output|grad_indice", name)}
    keys = [getattr(DispatchKey, key) for key in _KEYS]
    return sorted(n.removeprefix("fbgemm::") for n in names if any(has_kernel_for_dispatch_key(n, key) for key in keys))


def outcome(name: str) -> str | None:
    """The family of an operator that is translated, or the reason why it isn't; ``None`` where neither is known."""
    module = FUNCTIONS.get(name) or CONVERTERS.get(name) or TRACED.get(name)
    if module is not None:
        return FAMILIES[module]
    return next((reason for reason, patterns in REASONS.items() if any(re.fullmatch(p, name) for p in patterns)), None)


def table() -> str:
    """The table of README."""
    names = registered()
    done = [name for name in names if outcome(name) in FAMILIES.values()]
    lines = [
        f"fbgemm {fbgemm_gpu.__version__} registers {len(names)} operators for the CPU beside those for gradients; "
        f"{len(done)} of them are translated:",
        "",
        "| translated | |",
        "|---|---|",
        *(_row(family, names) for family in FAMILIES.values()),
        "",
        "| not translated: why | |",
        "|---|---|",
        *(_row(reason, names) for reason in REASONS),
    ]
    return "\n".join(lines)


def _row(head: str, names: list[str]) -> str:
    return f"| {head} | {', '.join(f'`{name}`' for name in names if outcome(name) == head) or 'none'} |"


def written(text: str) -> str:
    """A README's text with the table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    readme = Path(sys.argv[1])
    readme.write_text(written(readme.read_text(encoding="utf-8")), encoding="utf-8")
