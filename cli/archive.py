"""Archives of PyTorch: ``torch.save`` and ``torch.export.save`` write zip files without compression."""

from __future__ import annotations

import os
import zipfile

from onnxplug.errors import UsageError


def check_archive(path: str | os.PathLike[str]) -> None:
    """Checks that an archive holds no more than its own bytes; a file that is no archive is left to its reader.

    PyTorch never compresses. A compressed archive may hold a thousand times its size, and PyTorch, which maps tensors in place,
    would read the compressed bytes as numbers.

    Raises:
        UsageError: It holds more, or compressed files.
    """
    try:
        size = os.path.getsize(path)
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, EOFError):
        return
    packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
    whole = sum(entry.file_size for entry in entries)
    if packed is not None or whole > size:
        why = (
            f"{packed.filename!r} in it is compressed"
            if packed is not None
            else f"it would hold {whole} bytes in {size}"
        )
        raise UsageError(
            f"{os.fspath(path)} is not an archive that PyTorch wrote: {why}",
            hint="Of a file that you trust, torch.save(torch.load(path, weights_only=True), other) writes one that isn't.",
        )
