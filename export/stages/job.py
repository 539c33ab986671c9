"""What a build is about: the request, and the state that its stages hand on.

Knows: what belongs together in one build. Does not know: what any stage does.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from appliance.bundle import store
from appliance.targets.capabilities import Target
from export.arch import Opened
from export.tokenizer import TokenizerFiles
from quant.asked import Asked
from quant.kv import KvScales
from quant.scheme import Scheme
from quant.static import Ranges

Progress = Callable[[str, int, int], None]
"""Called with the stage ("calibrate", "quantize", "write"), how much of it is done and how much there is, as it goes."""


@dataclass(frozen=True)
class BuildRequest:
    """What to build.

    Attributes:
        source: checkpoint file or folder.
        targets: one variant is built for each.
        scheme: how weights and activations are kept.
        destination: folder of the bundle; an older bundle there is replaced when the new one is whole.
        name: the model's id on the endpoint.
        context: tokens of context, 0 = as many as the model was made for.
        command: the command line that makes this bundle again.
        license: the one it was pulled under, for a checkpoint that states none itself; "" = unknown.
        calibration: text file, folder of text files, or a record.json whose tokens are taken; None = the model writes its own.
        calibration_tokens: how many tokens to calibrate with.
        windows: of each text that the loss is measured on.
        accept_loss: go on when the loss is outside the scheme's band.
        target_files: folder of target files beside the built-in ones, for opening what was written.
        kept: folder for what the build works out (text, costs, integers), which stays for the next build of the same checkpoint;
            None = one beside the destination, removed when the bundle is there.
        said: how commands in the record name the source: a pulled model's name or a file's; "" = the name of `source`.
        exceptions: what a person asked for by names of weights.
        keep_quantized: weights that the checkpoint has on a 4- or 8-bit grid are carried over where the targets hold it.
    """

    source: Path
    targets: tuple[Target, ...]
    scheme: Scheme
    destination: Path
    name: str
    context: int
    command: str
    license: str = ""
    calibration: Path | None = None
    calibration_tokens: int = 32768
    windows: int = 2
    accept_loss: bool = False
    target_files: Path | None = None
    keep_quantized: bool = False
    kept: Path | None = None
    said: str = ""
    exceptions: tuple[Asked, ...] = ()

    @property
    def work(self) -> Path:
        """Folder of the decisions that an interrupted build left for the next one."""
        return self.kept or self.destination.parent / f".{self.destination.name}.work"

    def clear(self) -> None:
        """Remove it, unless it is to be kept."""
        if self.kept is None:
            shutil.rmtree(self.work, ignore_errors=True)


@dataclass(frozen=True)
class Change:
    """An exact rewrite of the float canonical graph, made before anything is planned (a rotation).

    Attributes:
        fingerprint: changes with the weights that it makes of given ones.
        apply: works in place.
    """

    fingerprint: str
    apply: Callable[[ir.Model], None]


@dataclass(frozen=True)
class Job:
    """One build under way. A stage takes it and gives it back with what it found out (`dataclasses.replace`).

    Attributes:
        opened: the checkpoint, its context as asked for.
        hashes: sha256 of the checkpoint's files, by name.
        tokenizer: what was written of it.
        scheme: the request's, with the exceptions that a chooser made.
        changes: what happens to every canonical graph before it is planned, in order.
        calibration: fingerprint of the calibration, by target; what `decide` finds calibrated results by.
        ranges: of static activations, by target and by the linear's node, once they are known.
        kv: scales of keys and values by layer, once they are known; None = they stay float.
        evidence: parts of record.json that stages found out, by key.
    """

    request: BuildRequest
    opened: Opened
    writer: store.BundleWriter
    progress: Progress
    hashes: Mapping[str, str]
    tokenizer: TokenizerFiles
    scheme: Scheme
    changes: tuple[Change, ...] = ()
    calibration: Mapping[str, str] | None = None
    ranges: Mapping[str, Mapping[str, Ranges]] | None = None
    kv: Mapping[int, KvScales] | None = None
    evidence: Mapping[str, Any] | None = None

    @property
    def source(self) -> str:
        """Fingerprint of the float model: the checkpoint's files, its configuration as it was opened, and the changes."""
        files = [f"{name}={digest}" for name, digest in sorted(self.hashes.items())]
        opened = f"{self.opened.model_type} {self.opened.config!r}"
        return " ".join([*files, opened, *(change.fingerprint for change in self.changes)])

    def model(self) -> ir.Model:
        """A fresh canonical float graph, changed as all of this build's are."""
        model = self.opened.build()
        for change in self.changes:
            change.apply(model)
        return model

    def fingerprint(self, target: Target) -> str:
        """Of the calibration for that target; "" when nothing is calibrated."""
        return (self.calibration or {}).get(target.name, "")
