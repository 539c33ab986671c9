"""What each quantized matrix loses of its outputs on real text: the same measure for every scheme, whoever found the integers.

Knows: a part of the float model beside the decided one, and what enters the float part's linears. Does not know: how parts are
run (`quant.side_by_side`), or what a solver looked at (`quant.proxy`, whose vectors are the calibration text's, with weights of
their own).

    loss = mean |x (W - W')^T|^2 / mean |x W^T|^2       W [N,K] float, W' what the integers stand for

x is what the float model hands to the linear: no other matrix's loss is in it. Activations are not rounded. An embedding is a
product with rows of the unit matrix, so of it the rows are compared that the text's tokens choose; a table that is tied to the
head counts as the head.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from appliance.bundle.vocabulary import INPUT_IDS, LINEAR, QUANT_EMBEDDING, QUANT_LINEAR
from quant.ablations import pieces_of
from quant.arrays import Floats
from quant.graph import tensor_of
from quant.layers import Part

ROWS = 256
"""Of x. Their products with W and with W - W' are an eighth of what a build's four windows cost the float model."""

Ids = npt.NDArray[np.int64]


def losses(plain: Part, decided: Part, streams: Mapping[str, np.ndarray], ids: Ids) -> dict[str, float | None]:
    """By name of the matrix, for all that are decided in this part; None where no number came out.

    Args:
        streams: what enters the float part's linears, [B,S,K] by stream tag.
        ids: [B,S], tokens of the same text.
    """
    found: dict[str, float | None] = {}
    tags = {weight: stream for stream, weights in plain.streams.items() for weight in weights}
    floats = {str(node.name): node for node in plain.nodes}
    for node in decided.nodes:
        if node.op_type not in (QUANT_LINEAR, QUANT_EMBEDDING):
            continue
        own = floats[str(node.name)]
        entering, weight = own.inputs[:2]
        assert entering is not None and weight is not None
        name = str(weight.name)
        if node.op_type == QUANT_LINEAR:
            found[name] = of_product(sampled(streams[tags[name]]), own, node)
        elif entering.name == INPUT_IDS and not any(use.node.op_type == LINEAR for use in weight.uses()):
            found[name] = of_rows(np.unique(ids), ids, own, node)
    return found


def sampled(stream: np.ndarray) -> Floats:
    """Rows [n,K] of the first window, evenly spread, without the first one: what a model makes of a text's first token is often
    a thousand times as long as all else, and the loss would be about it alone."""
    rows = np.asarray(stream[0, min(1, stream.shape[1] - 1) :])
    chosen = rows if len(rows) <= ROWS else rows[np.arange(ROWS) * len(rows) // ROWS]
    return np.ascontiguousarray(chosen, np.float32)


def of_product(x: Floats, plain: ir.Node, decided: ir.Node) -> float | None:
    """Of a Linear and its QuantLinear on x [n,K]."""
    lost = kept = 0.0
    for weight, rest in _pieces(plain, decided):
        kept += float(np.square(x @ weight.T).sum(dtype=np.float64))
        lost += float(np.square(x @ rest.T).sum(dtype=np.float64))
    return _ratio(lost, kept)


def of_rows(words: Ids, ids: Ids, plain: ir.Node, decided: ir.Node) -> float | None:
    """Of an Embedding and its QuantEmbedding on the tokens `ids`; `words` are the different ones, sorted."""
    counts, lost, kept, first = np.bincount(ids.reshape(-1)), 0.0, 0.0, 0
    for weight, rest in _pieces(plain, decided):
        here = words[(words >= first) & (words < first + len(weight))]
        kept += float((counts[here] * np.square(weight[here - first]).sum(1, dtype=np.float64)).sum())
        lost += float((counts[here] * np.square(rest[here - first]).sum(1, dtype=np.float64)).sum())
        first += len(weight)
    return _ratio(lost, kept)


def _pieces(plain: ir.Node, decided: ir.Node) -> Iterator[tuple[Floats, Floats]]:
    """W and W - W', some rows at a time."""
    whole, first = tensor_of(plain.inputs[1], plain).numpy(), 0
    for values in pieces_of(decided):
        weight = np.asarray(whole[first : first + len(values)], np.float32)
        yield weight, weight - values
        first += len(values)


def _ratio(lost: float, kept: float) -> float | None:
    """Six digits that count; 0 where nothing is lost of nothing."""
    if not np.isfinite(lost) or not np.isfinite(kept) or (lost and not kept):
        return None
    return float(f"{lost / kept:.6g}") if lost else 0.0
