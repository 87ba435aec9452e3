"""Folders that are to be written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from onnxplug.errors import SaveError
from onnxplug.kinds import check_path


def folder_path(name: str, folder: Any) -> Path:
    """The path of a folder, which need not be there yet.

    Args:
        name: The name of the argument, for the message.
        folder: The argument.

    Raises:
        SaveError: The system refuses the path.
        UsageError: It is no path.
    """
    check_path(name, folder)
    path = Path(os.fsdecode(folder))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise SaveError(f"the folder {path} can't be written: {error}") from error
    return path
