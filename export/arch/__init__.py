"""Discovery of architectures: every file in this folder is one, called exactly what config.json's `model_type` says.

A file offers `Config` (frozen dataclass), `read_config(checkpoint) -> Config`, `build(config, weights) -> ir.Model`,
`layout(checkpoint, config) -> Mapping[str, Stored] | None`, `IGNORED` (patterns of tensors that are not wanted),
`GGUF_NAME` (what GGUF's `general.architecture` calls it, or None) and `TINY` (small config.json objects by name). One that
makes embeddings and no text says so: `TASK = "embed"`.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import onnx_ir as ir

from appliance.errors import CheckpointError
from export.checkpoint.source import Checkpoint
from export.weights import Weights

Task = Literal["generate", "embed"]


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose architecture is known and whose config was read and accepted.

    Attributes:
        model_type: name of the architecture.
        config: the architecture's own frozen dataclass; every one has `context_length`, `vocab_size`, `hidden_size`.
    """

    checkpoint: Checkpoint
    model_type: str
    config: Any

    @property
    def task(self) -> Task:
        """What the model is for."""
        return task_of(self.model_type)

    def build(self) -> ir.Model:
        """A fresh canonical graph with lazy weights; may be called again for every graph that is wanted."""
        arch = find(self.model_type)
        model = arch.build(self.config, Weights(self.checkpoint, arch.layout(self.checkpoint, self.config), arch.IGNORED))
        assert isinstance(model, ir.Model)
        return model


def known() -> list[str]:
    """Every architecture's name, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))


def find(model_type: str) -> ModuleType:
    """The architecture's module; `CheckpointError` with the known names when there is none."""
    if model_type not in known():
        raise CheckpointError(f'unknown architecture "{model_type}"', f"known architectures: {', '.join(known())}")
    return importlib.import_module(f"export.arch.{model_type}")


def task_of(model_type: str) -> Task:
    """What models of that architecture are for."""
    task: Task = getattr(find(model_type), "TASK", "generate")
    return task


def open_model(checkpoint: Checkpoint) -> Opened:
    """Find the checkpoint's architecture and read its config.

    Raises:
        CheckpointError: the architecture is unknown, or the config asks for something that is not supported.
    """
    model_type = _model_type(checkpoint)
    try:
        arch = find(model_type)
    except CheckpointError as failure:
        raise CheckpointError(f"{checkpoint.path}: {failure.what}", failure.fix) from None
    return Opened(checkpoint, model_type, arch.read_config(checkpoint))


def _model_type(checkpoint: Checkpoint) -> str:
    key = "general.architecture" if checkpoint.format == "gguf" else "model_type"
    said = checkpoint.config.get(key)
    if not isinstance(said, str):
        raise CheckpointError(f'{checkpoint.path}: the config does not say its "{key}"', "fetch the checkpoint again")
    if checkpoint.format == "gguf":
        for name in known():
            if said == find(name).GGUF_NAME:
                return name
    return said
