"""The float weights that every side of bench/quality.py is made from: a GGUF file with every tensor in float32.

Checkpoints that come with Python packages are quantized already, and a peer that has the same blocks finds their numbers again
for nothing: llama.cpp's Q4_1 of a Q4_1 file loses nothing at all. So the channels can be shuffled first: the residual stream's,
each MLP's and each value head's, all that read or write them together. That is the same model, to the last bit but for the
order of sums; but a block of 32 neighbours then holds numbers of as many blocks, and nobody finds the old scales.

    embedding columns, norm gains, output columns ---- one order for the residual stream
    gate and up rows, down columns ------------------- one order a layer
    value rows, attention output columns ------------- one order a layer and value head

Knows: GGUF, and which channels belong together in the architectures below. Does not know: who reads the file.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]

ARCHITECTURES = ("llama", "gemma3")
"""Those whose tensors are known by `Shuffle`."""
READ = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
"""Matrices of a layer whose columns are the residual stream's channels."""
GAINS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
"""Norms over the residual stream."""


@dataclass(frozen=True)
class Sizes:
    """What the shuffling needs to know of a model."""

    hidden: int
    mlp: int
    heads: int
    value_heads: int
    head: int

    @classmethod
    def read(cls, reader: gguf.GGUFReader) -> "Sizes":
        """From the file's header and the shapes of its first layer."""
        said = str(reader.fields["general.architecture"].contents())
        if said not in ARCHITECTURES:
            raise SystemExit(f"the channels of a {said} model cannot be shuffled; known: {', '.join(ARCHITECTURES)}")
        shapes = {tensor.name: [int(one) for one in tensor.shape] for tensor in reader.tensors}
        heads = int(reader.fields[f"{said}.attention.head_count"].contents())
        value_heads = int(reader.fields[f"{said}.attention.head_count_kv"].contents())
        hidden, values = shapes["blk.0.attn_v.weight"]
        return cls(hidden, shapes["blk.0.ffn_gate.weight"][1], heads, value_heads, values // value_heads)


class Shuffle:
    """New orders of all channels, from one seed."""

    def __init__(self, sizes: Sizes, seed: int):
        self._sizes, self._seed = sizes, seed
        self._stream = np.random.default_rng(seed).permutation(sizes.hidden)

    def __call__(self, name: str, array: Floats) -> Floats:
        """The tensor [N,K] or [N] with its channels in the new order."""
        part = name.removesuffix(".weight").split(".")
        if part[0] in ("token_embd", "output", "output_norm"):
            return array[..., self._stream]
        if part[0] != "blk":
            return array  # rope frequencies
        layer, kind = int(part[1]), part[2]
        if kind in GAINS:
            return array[self._stream]
        if kind in READ:
            array = array[:, self._stream]
        if kind in ("ffn_gate", "ffn_up"):
            return array[self._mlp(layer)]
        if kind == "attn_v":
            return array[self._values(layer)]
        if kind == "attn_output":
            return array[self._stream][:, self._outputs(layer)]
        if kind == "ffn_down":
            return array[self._stream][:, self._mlp(layer)]
        return array  # queries and keys keep their rows: ropes tie them; so do their norms

    def _mlp(self, layer: int) -> Order:
        return np.random.default_rng([self._seed, layer, 0]).permutation(self._sizes.mlp)

    def _heads(self, layer: int) -> list[Order]:
        random = np.random.default_rng([self._seed, layer, 1])
        return [random.permutation(self._sizes.head) for _ in range(self._sizes.value_heads)]

    def _values(self, layer: int) -> Order:
        return np.concatenate([order + at * self._sizes.head for at, order in enumerate(self._heads(layer))])

    def _outputs(self, layer: int) -> Order:
        """Each query head's outputs come in the order of the value head that it reads."""
        orders, shared = self._heads(layer), self._sizes.heads // self._sizes.value_heads
        return np.concatenate([orders[at // shared] + at * self._sizes.head for at in range(self._sizes.heads)])


def write_float(source: Path, destination: Path, seed: int = 0) -> None:
    """Write `source` with every tensor in float32; with a seed, its channels shuffled. One tensor is in memory at a time."""
    reader = gguf.GGUFReader(source)
    change = Shuffle(Sizes.read(reader), seed) if seed else None
    part = destination.with_suffix(".part")
    architecture = gguf.Keys.General.ARCHITECTURE
    writer = gguf.GGUFWriter(part, str(reader.fields[architecture].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in (architecture, gguf.Keys.General.FILE_TYPE):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        shape = [int(one) for one in reversed(tensor.shape)]
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * int(tensor.n_elements))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        writer.write_tensor_data(np.ascontiguousarray(change(tensor.name, array) if change else array))
    writer.close()
    part.rename(destination)
