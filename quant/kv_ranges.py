"""Scales of keys and values from a calibration text: hidden states go through the model layer by layer, ranges are kept.

Knows: what a part gives out, how a range becomes a scale. Does not know: how a part is opened (`quant.layers.Opener`), where
the text comes from, how scales are written (`quant.kv`).

A channel's range is the largest that occurred, over 127. On SmolLM2 (12 windows that it wrote itself, six others to measure
on) that gave a signal-to-noise ratio of 43.6 dB for keys and 38.2 for values; cutting off the largest 0.01, 0.05 and 0.1 %
gave 43.8, 43.8, 43.4 and 38.0, 35.4, 33.2; a tenth of room above the largest 42.9 and 37.9.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from appliance.bundle.vocabulary import present_name
from appliance.errors import CheckpointError
from quant import spill
from quant.kv import STEPS, KvScales, envelope, rotary_pairs
from quant.layers import Opener, Part, Running, cut, pass_through, width_of
from quant.turns import Turns, digest, each_of

VERSION = 1
"""Raised whenever the same model and text would give other scales."""
LEAST = 1e-3
"""A channel's range is at least this share of its layer's largest: one that never stirred in the text may do so later."""

_TOKENS = 2048
"""Tokens that go through a part at once, and on which the noise of a layer is measured."""

Ids = npt.NDArray[np.int64]
Progress = Callable[[int, int, str], None]
"""(layers done, layers in all, name of the layer)."""


@dataclass(frozen=True)
class Setup:
    """What the collection works with.

    Attributes:
        ids: [W,S], windows of the calibration text.
        opener: opens parts.
        work: folder for hidden states and the result.
        key: what the result depends on beside the text; equal keys find an earlier run's result.
    """

    ids: Ids
    opener: Opener
    work: Path
    key: str


@dataclass(frozen=True)
class LayerScales:
    """One layer: its scales, and the signal-to-noise ratio in dB of keys and values on the first tokens of the text."""

    layer: int
    scales: KvScales
    key_snr_db: float
    value_snr_db: float


def collect(model: ir.Model, setup: Setup, progress: Progress | None = None) -> tuple[LayerScales, ...]:
    """Scales of every layer, in order.

    Args:
        model: canonical, decided or not (what it is shipped as has the right ranges), its state float; not changed.

    Raises:
        BadInput: the model cannot be cut into layers.
        CheckpointError: keys or values are not finite; the layer is named.
    """
    path = setup.work / f"kv.{_key(setup)}.json"
    found = _read(path)
    if found:
        return found
    embed, *layers = [part for part in cut(model) if part.layer is not None or part.entering is None]
    pairs = rotary_pairs(model)
    files = Turns(setup.work, f"kv.{_key(setup)}", {"": (*setup.ids.shape, width_of(embed))})
    batch = max(1, _TOKENS // setup.ids.shape[1])
    stopped = files.resume()
    made = each_of(stopped[1], _layer) if stopped is not None else []
    if stopped is None or len(made) != stopped[0] or len(made) > len(layers):
        made = []
        files.begin()
        for _ in pass_through(Running(embed.build(streams=False), setup.opener), setup.ids, files.entering(0), batch):
            pass
        files.finish(0, [])
    for index, part in enumerate(layers[len(made) :], len(made)):
        if progress:
            progress(index, len(layers), part.name)
        assert part.layer is not None
        running = Running(part.build(streams=False, state=True), setup.opener)
        range_ = _Range(part, part.layer, pairs[part.layer])
        for _, out in pass_through(running, files.entering(index), files.leaving(index), batch):
            range_.add(*(out.state[present_name(part.layer, kind)] for kind in ("key", "value")))
        made.append(range_.scales())
        files.finish(index + 1, [_told(one) for one in made])
    _write(path, made)
    files.end()
    if progress:
        progress(len(layers), len(layers), "")
    return tuple(made)


def scale_of(most: np.ndarray) -> np.ndarray:
    """Scales [Hkv,1,d] float32 from the largest sizes [Hkv,d]."""
    floor = max(float(most.max()) * LEAST, float(np.finfo(np.float32).tiny) * STEPS)
    found: np.ndarray = (np.maximum(most, floor) / np.float32(STEPS)).astype(np.float32)[:, None, :]
    return found


class _Range:
    """What one layer's keys and values reach."""

    def __init__(self, part: Part, layer: int, pairs: int):
        self._name, self._layer, self._pairs = part.name, layer, pairs
        self._most: list[np.ndarray] = []
        self._first: list[np.ndarray] = []

    def add(self, key: np.ndarray, value: np.ndarray) -> None:
        """Keys, rotated, and values of some windows, [B,Hkv,S,d]."""
        reached = [envelope(key, self._pairs).max(axis=(0, 2)), np.abs(value).max(axis=(0, 2))]
        if not all(np.isfinite(most).all() for most in reached):
            raise CheckpointError(f"keys or values of {self._name} are not finite", "the checkpoint is damaged; fetch it again")
        self._most = [np.maximum(old, new) for old, new in zip(self._most or reached, reached, strict=True)]
        self._first = self._first or [key, value]

    def scales(self) -> LayerScales:
        """The layer's result."""
        key, value = (scale_of(most) for most in self._most)
        noise = (_snr(x, scale) for x, scale in zip(self._first, (key, value), strict=True))
        return LayerScales(self._layer, KvScales(key, value), *noise)


def _snr(x: np.ndarray, scale: np.ndarray) -> float:
    noise = float(((np.clip(np.rint(x / scale), -STEPS - 1, STEPS) * scale - x) ** 2).sum(dtype=np.float64))
    signal = float((x**2).sum(dtype=np.float64))
    return 10 * float(np.log10(max(signal, 1e-300) / max(noise, 1e-300)))


def _key(setup: Setup) -> str:
    said = f"{VERSION} {setup.ids.shape} {setup.key}"
    return digest(setup.ids, said)[:32]


def _write(path: Path, layers: list[LayerScales]) -> None:
    spill.replace_file(path, lambda place: spill.write_text(place, json.dumps([_told(one) for one in layers])))


def _read(path: Path) -> tuple[LayerScales, ...]:
    """An earlier run's result; empty when there is none, or none that can be read."""
    try:
        return tuple(each_of(json.loads(path.read_text(encoding="utf-8")), _layer))
    except (OSError, ValueError):
        return ()


def _told(one: LayerScales) -> dict[str, Any]:
    scales = {"key": one.scales.key[:, 0].tolist(), "value": one.scales.value[:, 0].tolist()}
    return {"layer": one.layer, **scales, "snr": [one.key_snr_db, one.value_snr_db]}


def _layer(told: dict[str, Any]) -> LayerScales:
    """What `_told` told of."""
    key, value = (np.array(told[kind], np.float32)[:, None, :] for kind in ("key", "value"))
    if key.shape != value.shape or not (np.isfinite(key).all() and np.isfinite(value).all()):
        raise ValueError("no scales")
    return LayerScales(int(told["layer"]), KvScales(key, value), float(told["snr"][0]), float(told["snr"][1]))
