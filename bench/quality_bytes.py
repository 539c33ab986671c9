"""What a model's files really hold, tensor by tensor: bytes of the body, of the tables, of what is computed; types by count.

Knows: names that exporters of ONNX and GGUF give tensors, how both say types. Does not know: what the numbers are worth.

    body    the matrices of the layers: integers, scales, zero points (not norms)
    tables  embedding and head, a tied one once
    other   norms and constants
    made    tables that are computed from the config (ropes): no weights, and llama.cpp has none in its files
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from export.checkpoint.gguf_header import read_header

MADE = ("cos_cache", "sin_cache", "rope", "inv_freq")
TABLES = ("embed_tokens", "lm_head", "token_embd", "output.weight")
LAYERS = ("layers.", "blk.")


@dataclass(frozen=True)
class Holding:
    """Bytes by kind, and how many matrices of the body have which form."""

    body: int
    tables: int
    other: int
    made: int
    forms: dict[str, int]

    @property
    def weights(self) -> int:
        """Bytes of all that is no computed table: what models are compared by."""
        return self.body + self.tables + self.other


def kind_of(name: str) -> str:
    """Which field of `Holding` a tensor counts for."""
    low = name.lower()
    if any(part in low for part in MADE):
        return "made"
    if "norm" in low:
        return "other"
    if any(part in low for part in LAYERS):
        return "body"
    return "tables" if any(low.startswith(part) or f".{part}" in low for part in TABLES) else "other"


def added(tensors: list[tuple[str, int]], forms: Counter[str]) -> Holding:
    """From names and bytes."""
    sums = Counter[str]()
    for name, size in tensors:
        sums[kind_of(name)] += size
    return Holding(sums["body"], sums["tables"], sums["other"], sums["made"], dict(forms.most_common()))


def of_gguf(path: Path) -> Holding:
    """Of a GGUF file."""
    import gguf

    tensors, forms = [], Counter[str]()
    for one in read_header(path).tensors:
        kind = gguf.GGMLQuantizationType(one.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        tensors.append((one.name, math.prod(one.shape) // block * size))
        forms[kind.name] += len(one.shape) == 2 and kind_of(one.name) == "body"
    return added(tensors, +forms)


def of_onnx(path: Path) -> Holding:
    """Of an ONNX file and its external data."""
    import onnx_ir as ir

    model = ir.load(path)
    forms = Counter[str]()
    for node in model.graph:
        if node.op_type == "MatMulNBits" and kind_of(node.inputs[1].name) == "body":
            zero = " asym" if len(node.inputs) > 3 and node.inputs[3] is not None else ""
            forms[f"int{node.attributes['bits'].value} g{node.attributes['block_size'].value}{zero}"] += 1
        elif node.op_type == "MatMul" and (weight := node.inputs[1].const_value) is not None and len(weight.shape) == 2:
            forms[str(weight.dtype).lower()] += kind_of(node.inputs[1].name) == "body"
    tensors = [(name, int(one.const_value.nbytes)) for name, one in model.graph.initializers.items()]
    return added(tensors, +forms)


def parameters(float_gguf: Path) -> tuple[int, int]:
    """Weights of the body's matrices and of the whole model."""
    sizes = [(kind_of(one.name), math.prod(one.shape)) for one in read_header(float_gguf).tensors]
    return sum(size for kind, size in sizes if kind == "body"), sum(size for kind, size in sizes if kind != "made")
