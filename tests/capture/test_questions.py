"""Every form in which Python asks for a size: at other sizes the model is right, or its limit was said, in both modes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug
from tests.support.sampling import rotated
