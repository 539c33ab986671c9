"""What a checkpoint is to the rest of the exporter, whatever file format it came in.

Knows: names, shapes, one tensor at a time. Does not know: architectures or ONNX.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Checkpoint(Protocol):
    """An opened checkpoint. Opening reads headers only; `read` touches the disk for just one tensor and keeps nothing.

    Attributes:
        path: the file or folder it was opened from.
        format: "safetensors" or "gguf".
        config: for safetensors the decoded config.json; for GGUF its metadata under their own names
            ("general.architecture", "llama.block_count", ...).
        license: as the checkpoint states it, or "unknown".
    """

    # Properties, so that a frozen dataclass is one.
    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def license(self) -> str: ...

    def names(self) -> Sequence[str]:
        """Tensor names as the file has them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in C order (rows first; GGUF stores it reversed). `CheckpointError` when there is no such tensor."""

    def stored_type(self, name: str) -> str:
        """How the file keeps it: "F32", "BF16", "Q4_1", ..."""

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, C order, freshly read. `CheckpointError` on damage."""

    def files(self) -> Sequence[Path]:
        """The weight files, for hashing into the bundle's provenance."""

    def sidecar(self, name: str) -> Path | None:
        """A file beside the weights ("tokenizer.json", "tokenizer.model", "generation_config.json", ...), or None."""
