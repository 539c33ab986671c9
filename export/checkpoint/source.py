"""What a checkpoint is to the rest of the exporter, whatever file format it came in.

Knows: names, shapes, one tensor at a time. Does not know: architectures or ONNX.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Grid:
    """A matrix as its file stores it: value = q * scale, or (q + 2^(bits-1)) * scale + offset.

    Attributes:
        q: [N,K] int8, signed: -8..7 for 4 bits.
        scales: [N,G] float16, G = K/group.
        offsets: [N,G] float16, what the lowest integer stands for; None where the grid goes through 0.
    """

    q: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None


@dataclass(frozen=True)
class StoredGrid:
    """A matrix that is quantized already, on a plain grid.

    Attributes:
        kind: the file's name for it: "Q4_0", ...
        group: neighbours along a row that share a scale; rows are whole groups.
        has_offsets: whether each group has an offset too.
        read: reads the integers and scales, freshly; `CheckpointError` on damage.
    """

    kind: str
    bits: int
    group: int
    has_offsets: bool
    read: Callable[[], Grid]


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

    def stored_grid(self, name: str) -> StoredGrid | None:
        """The integers that the file holds, when it is a matrix on a plain grid of 4 or 8 bits; None when it is not."""

    def files(self) -> Sequence[Path]:
        """The weight files, for hashing into the bundle's provenance."""

    def sidecar(self, name: str) -> Path | None:
        """A file beside the weights ("tokenizer.json", "tokenizer.model", "generation_config.json", ...), or None."""
