"""Compute the tables of rotary angles when a session is loaded, instead of keeping them in the file.

Knows: what a table is made of. Does not know: who reads it.
onnxruntime folds the nodes into one constant as it loads the graph, so nothing is computed twice. Gemma 3 270M for its
32768 tokens: 67 MB of tables in a bundle of 294 MB.

    Range(0, positions) - Unsqueeze - Mul(frequencies) - Cos or Sin --> [positions, d/2]

Products and angles are float32, as `export.blocks` computes them.
"""

import numpy as np
import onnx_ir as ir

from appliance.targets.capabilities import Flags, Target
from export.blocks import FREQUENCIES, ROPE_COS
from export.graph import Nodes, add_initializer, sizes
from export.step import Step

STAGE = 50


def wanted(flags: Flags) -> bool:
    """Dynamic graphs, which onnxruntime's own kernels run. A static one goes through a vendor's compiler, and is short."""
    return flags.form == "dynamic"


def run(model: ir.Model, target: Target, step: Step) -> None:
    """Replace every table whose frequencies are known."""
    graph = model.graph
    tables = [value for value in graph.initializers.values() if FREQUENCIES in value.meta and value.uses()]
    angles: dict[bytes, ir.Value] = {}
    first = graph[0]
    for table in tables:
        assert table.const_value is not None
        at = Nodes(graph, f"/model/{table.name}", first)
        frequencies: np.ndarray = table.meta[FREQUENCIES]
        positions = sizes(table.const_value)[0]
        key = frequencies.tobytes()
        if key not in angles:
            name = f"{table.name}.frequencies"
            constant = add_initializer(graph, name, ir.tensor(frequencies, name=name), {"role": "rope"})
            counted = at.value("Range", [at.number(0.0), at.number(float(positions)), at.number(1.0)])
            angles[key] = at.value("Mul", [at.value("Unsqueeze", [counted, at.ints(1)]), constant])
        wave = "Cos" if str(table.name).startswith(ROPE_COS) else "Sin"
        made = at.value(wave, [angles[key]])
        ir.convenience.replace_all_uses_with(table, made)
