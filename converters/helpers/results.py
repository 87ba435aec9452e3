"""Which results of a node are read."""

from __future__ import annotations

import operator

from onnxplug.interpret.node import FxNode


def wanted(node: FxNode, index: int) -> bool:
    """Whether anything reads a given result of a node."""
    users = node.fx.users
    if not all(user.target is operator.getitem for user in users):
        return True
    return any(user.args[1] == index and user.users for user in users)
