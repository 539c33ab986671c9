"""Roles told from structure: graphs of other exporters, our own with all tags and names taken off, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle.vocabulary import LAYER, PARTS, ROLE, STREAM
from appliance.errors import BadInput
from appliance.targets import load
from appliance.targets.capabilities import Target
from export import arch, parity
from export.lower import lower
from quant.foreign.infer import Inference, infer
from quant.foreign.quantize import open_graph, refuse
from tests.golden import recipe
from tests.quant.foreign.graphs import FOREIGN, weight, write_foreign
from tests.static_pair import fresh_seed

SEPARATE = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"]
PACKED = ["attn.q+attn.k+attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"]
BLOCKS = {
    "genai-llama": PACKED,
    "genai-qwen3": PACKED,
    "torch-gemma3_text-eager": SEPARATE,
    "torch-gpt2-eager": ["attn.q+attn.k+attn.v", "attn.o", "mlp.up", "mlp.down"],
    "torch-gpt2-sdpa": ["attn.q+attn.k+attn.v", "attn.o", "mlp.up", "mlp.down"],
    "torch-llama-eager": SEPARATE,
    "torch-llama-sdpa": SEPARATE,
    "torch-phi3-eager": ["attn.q+attn.k+attn.v", "attn.o", "mlp.gate+mlp.up", "mlp.down"],
    "torch-qwen3-eager": SEPARATE,
}
"""Roles in the order in which the models compute."""
ROWS = {
    "genai-llama": {"attn.q": (0, 32), "attn.k": (32, 48), "attn.v": (48, 64)},
    "genai-qwen3": {"attn.q": (0, 64), "attn.k": (64, 96), "attn.v": (96, 128)},
    "torch-gpt2-eager": {"attn.q": (0, 32), "attn.k": (32, 64), "attn.v": (64, 96)},
    "torch-gpt2-sdpa": {"attn.q": (0, 32), "attn.k": (32, 64), "attn.v": (64, 96)},
    "torch-phi3-eager": {"attn.q": (0, 32), "attn.k": (32, 48), "attn.v": (48, 64), "mlp.gate": (0, 48), "mlp.up": (48, 96)},
}


def inferred(name: str, folder: Path, change: Callable[[ir.Model], None] = lambda model: None) -> Inference:
    return infer(open_graph(write_foreign(name, folder, fresh_seed(), change)))


def test_every_graph_is_looked_at() -> None:
    assert sorted(BLOCKS) == FOREIGN


@pytest.mark.parametrize("name", FOREIGN)
def test_roles_of_graphs_of_other_exporters(name: str, tmp_path: Path) -> None:
    found = inferred(name, tmp_path)
    assert found.unknown == ()
    assert ["+".join(one.roles) for one in found.matrices] == ["embed", *BLOCKS[name] * 2, "head"]
    assert [one.layer for one in found.matrices] == [None, *[0] * len(BLOCKS[name]), *[1] * len(BLOCKS[name]), None]
    rows = {role: tuple(span) for one in found.matrices for role, span in (one.rows or {}).items()}
    assert rows == ROWS.get(name, {})
    streams = {role: one.stream for one in found.matrices for role in one.roles if one.layer == 1}
    assert streams["attn.q"] == streams["attn.v"] == "layers.1.attn_in" and streams["attn.o"] == "layers.1.attn_out"
    assert streams["mlp.up"] == "layers.1.mlp_in" and streams["mlp.down"] == "layers.1.mlp_mid"


@pytest.mark.parametrize("name", ["genai-llama", "genai-qwen3"])
def test_roles_are_those_that_the_builders_names_say(name: str, tmp_path: Path) -> None:
    """The names are not looked at; here they are the independent witness."""
    for one in inferred(name, tmp_path).matrices:
        said = one.matrix.name
        if one.roles not in (("embed",), ("head",)):
            assert f"layers.{one.layer}." in said
            assert all(f"{role.split('.')[1]}_proj" in said or "qkv_proj" in said for role in one.roles), (said, one.roles)


def test_norms_biases_and_positions_have_roles_too(tmp_path: Path) -> None:
    others = inferred("torch-gpt2-eager", tmp_path).others
    named = {name.rpartition("transformer.")[2]: role for name, role in others.items()}
    assert named["wpe.weight"] == "position" and named["ln_f.weight"] == "norm" and named["ln_f.bias"] == "bias"
    assert named["h.1.attn.c_attn.bias"] == "bias"
    assert not any("inv_freq" in name for name in inferred("torch-llama-eager", tmp_path).others)


OURS = [("llama", "all"), ("llama", "tied"), ("mistral", "window"), ("gemma3_text", "all"), ("gemma3_text", "period")]
TARGETS: dict[str, Callable[[], Target]] = {
    "contrib": lambda: load("cpu"),
    "plain": parity.reference_target,
    "static": lambda: load("cpu-static"),
}


def bare(model: ir.Model, seed: int) -> dict[str, dict[str, str]]:
    """Take tags and telling names off; the tags by the new names."""
    graph = model.graph
    order = np.random.default_rng(seed).permutation(len(graph.initializers))
    tags = {}
    for number, value in zip(order, list(graph.initializers.values()), strict=True):
        if value.is_graph_input():
            continue
        value.name = f"w{number}"
        tags[f"w{number}"] = dict(value.metadata_props)
        value.metadata_props.clear()
    for number, node in enumerate(graph):
        node.name = f"n{number}"
        node.metadata_props.clear()
    return tags


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("kind", "variant"), OURS)
def test_our_own_graphs_give_their_tags_back(kind: str, variant: str, target: str) -> None:
    seed = fresh_seed()
    config = arch.find(kind).TINY[variant]
    opened = arch.open_model(recipe.Memory(config, recipe.tensors(config, 1)))
    for model in lower(opened.build, TARGETS[target](), 64, 16).graphs.values():
        tags = bare(model, seed)
        found = infer(model)
        assert found.unknown == (), seed
        told: dict[str, dict[str, str]] = {}
        for one in found.matrices:
            name = one.matrix.name
            if name in told and one.roles == ("head",):
                continue  # tied: the tag stays the embedding's
            told[name] = {STREAM: one.stream} | ({} if one.layer is None else {LAYER: str(one.layer)})
            if one.rows:
                told[name][PARTS] = ",".join(f"{role}:{first}:{end}" for role, (first, end) in one.rows.items())
            else:
                told[name][ROLE] = "+".join(one.roles)
        wanted = {name: tag for name, tag in tags.items() if STREAM in tag}
        # A tied head lies transposed in a file of its own here, so it has the embedding's tag twice.
        assert {name: tag for name, tag in told.items() if tag.get(ROLE) not in ("embed", "head")} == {
            name: tag for name, tag in wanted.items() if tag.get(ROLE) not in ("embed", "head")
        }, seed
        assert {tag.get(ROLE) for tag in told.values()} >= {"embed"}


def product_named(model: ir.Model, role: str, layer: int = 0) -> ir.Node:
    found = infer(model)
    return next(one.matrix.node for one in found.matrices if role in one.roles and one.layer == layer)


def add_weight(model: ir.Model, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> ir.Value:
    tensor = ir.tensor(weight(name, shape, 1).astype(dtype), name=name)
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def insert(model: ir.Model, before: ir.Node, op: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
    node = ir.node(op, inputs, attributes, name=f"added/{op}", outputs=[ir.Value(name=f"added/{op}/{len(model.graph)}")])
    model.graph.insert_before(before, node)
    return node.outputs[0]


def adapter(model: ir.Model) -> None:
    """q + B A x: two products make the query."""
    q = product_named(model, "attn.q")
    following = q.outputs[0].uses()[0].node
    inner = insert(model, following, "MatMul", [q.inputs[0], add_weight(model, "lora.a", (32, 4))])
    outer = insert(model, following, "MatMul", [inner, add_weight(model, "lora.b", (4, 32))])
    total = insert(model, following, "Add", [q.outputs[0], outer])
    for use in [use for use in q.outputs[0].uses() if use.node is not total.producer()]:
        use.node.replace_input_with(use.idx, total)


def gated_attention(model: ir.Model) -> None:
    """The attention's result times the sigmoid of a product."""
    q, o = product_named(model, "attn.q"), product_named(model, "attn.o")
    gate = insert(model, o, "MatMul", [q.inputs[0], add_weight(model, "attn.gate", (32, 32))])
    o.replace_input_with(0, insert(model, o, "Mul", [o.inputs[0], insert(model, o, "Sigmoid", [gate])]))


def no_activation(model: ir.Model) -> None:
    down = product_named(model, "mlp.down")
    active = next(node for node in model.graph if node.op_type == "Sigmoid")
    following = active.outputs[0].uses()[0].node
    gate = active.inputs[0]
    for use in following.outputs[0].uses():
        use.node.replace_input_with(use.idx, gate)
    assert down


def three_ways(model: ir.Model) -> None:
    down, gate = product_named(model, "mlp.down"), product_named(model, "mlp.gate")
    third = insert(model, down, "MatMul", [gate.inputs[0], add_weight(model, "third", (32, 48))])
    down.replace_input_with(0, insert(model, down, "Add", [down.inputs[0], third]))


def side_branch(model: ir.Model) -> None:
    """A product of the hidden state that leads nowhere known: into an output of its own."""
    gate = product_named(model, "mlp.gate")
    extra = insert(model, gate, "MatMul", [gate.inputs[0], add_weight(model, "value_head", (32, 8))])
    extra.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(extra)


def experts(model: ir.Model) -> None:
    gate = product_named(model, "mlp.gate")
    gate.replace_input_with(
        0, insert(model, gate, "Einsum", [gate.inputs[0], add_weight(model, "mixed", (32, 32))], equation="bsi,ij->bsj")
    )


def cast_weight(model: ir.Model) -> None:
    """A weight in half precision that the graph itself widens."""
    gate = product_named(model, "mlp.gate")
    half = add_weight(model, "half", (32, 48), np.float16)
    gate.replace_input_with(1, insert(model, gate, "Cast", [half], to=int(ir.DataType.FLOAT)))


def left_side(model: ir.Model) -> None:
    """W x: the weight is the first side."""
    gate = product_named(model, "mlp.gate")
    turned = insert(model, gate, "Transpose", [gate.inputs[0]], perm=[0, 2, 1])
    turned = insert(model, gate, "MatMul", [add_weight(model, "first", (32, 32)), turned])
    gate.replace_input_with(0, insert(model, gate, "Transpose", [turned], perm=[0, 2, 1]))


UNKNOWN: dict[str, tuple[Callable[[ir.Model], None], str, str]] = {
    "adapter": (adapter, "", "its query comes from 2 products"),
    "gated attention": (gated_attention, "", "an attention and something else enter it together"),
    "no activation": (no_activation, "", "cannot be told which is the gate"),
    "three ways": (three_ways, "", "3 products enter it"),
    "side branch": (side_branch, "value_head", "nothing shows what it is for"),
    "experts": (experts, "mixed", "Einsum holds it"),
    "half precision behind a cast": (cast_weight, "half", "MatMul holds it"),
    "weight on the left": (left_side, "first", "MatMul holds it"),
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_what_cannot_be_told_is_named(fault: str, tmp_path: Path) -> None:
    change, name, why = UNKNOWN[fault]
    found = inferred("torch-llama-eager", tmp_path, change)
    said = [f"{one.name} {one.node}: {one.why}" for one in found.unknown]
    assert any(name in one and why in one for one in said), said
    with pytest.raises(BadInput, match="--leave-float") as caught:
        refuse(found)
    assert "\n" not in str(caught.value)


def in_halves(model: ir.Model) -> None:
    gate = product_named(model, "mlp.gate")
    gate.replace_input_with(1, add_weight(model, "half", (32, 48), np.float16))


def quantized(model: ir.Model) -> None:
    gate = product_named(model, "mlp.gate")
    packed = ir.tensor(np.zeros((48, 1, 16), np.uint8), name="packed")
    value = ir.Value(name="packed", shape=ir.Shape((48, 1, 16)), type=ir.TensorType(packed.dtype), const_value=packed)
    model.graph.register_initializer(value)
    node = ir.node(
        "MatMulNBits", [gate.inputs[0], value], {"K": 32, "N": 48, "bits": 4, "block_size": 32}, domain="com.microsoft"
    )
    model.graph.insert_before(gate, node)


def headless(model: ir.Model) -> None:
    hidden = product_named(model, "mlp.gate").inputs[0]
    assert hidden is not None
    hidden.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs[:] = [hidden]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_halves, "half is FLOAT16, float32 is read"),
        (quantized, "quantized already"),
        (headless, "comes from a product with a head"),
    ],
)
def test_a_graph_of_another_kind_is_refused(change: Callable[[ir.Model], None], words: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=words):
        inferred("torch-llama-eager", tmp_path, change)


def test_gate_and_up_are_told_by_the_activation_and_not_by_their_order(tmp_path: Path) -> None:
    """Operands of every product of two sides are swapped: the same numbers, so the same roles."""

    def swap(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == "Mul":
                first, second = node.inputs
                node.replace_input_with(0, second)
                node.replace_input_with(1, first)

    plain, swapped = (
        inferred("torch-llama-eager", tmp_path / name, change) for name, change in (("a", lambda _: None), ("b", swap))
    )
    assert [(one.matrix.name, one.roles) for one in plain.matrices] == [(one.matrix.name, one.roles) for one in swapped.matrices]


def test_nodes_out_of_order_are_read_too(tmp_path: Path) -> None:
    """onnxruntime takes such files, so exporters leave them."""

    def reverse(model: ir.Model) -> None:
        for node in list(model.graph):
            model.graph.remove(node)
            model.graph.insert_before(model.graph[0], node) if len(model.graph) else model.graph.append(node)

    plain, reversed_ = (
        inferred("genai-llama", tmp_path / name, change) for name, change in (("a", lambda _: None), ("b", reverse))
    )
    roles = [{one.matrix.name: (one.roles, one.layer) for one in found.matrices} for found in (plain, reversed_)]
    assert roles[0] == roles[1] and not reversed_.unknown


def test_parts_that_alternate_head_by_head_have_no_rows(tmp_path: Path) -> None:
    """As GPT-NeoX packs them: each head's query, key and value, then the next head's."""
    source = write_foreign("torch-gpt2-eager", tmp_path, fresh_seed())
    model = open_graph(source)
    found = {one.roles: one for one in infer(model).matrices if one.layer == 0}
    packed = found["attn.q", "attn.k", "attn.v"]
    assert packed.rows is not None
    split = next(node for node in model.graph if node.op_type == "Split")
    sizes = ir.tensor(np.array([16, 16, 16]), name="by.head")
    value = ir.Value(name="by.head", shape=ir.Shape((3,)), type=ir.TensorType(sizes.dtype), const_value=sizes)
    model.graph.register_initializer(value)
    split.attributes.pop("num_outputs", None)
    split.resize_inputs(2)
    split.replace_input_with(1, value)
    alternating = next(one for one in infer(model).matrices if one.layer == 0 and len(one.roles) == 3)
    assert alternating.roles == packed.roles and alternating.rows is None


def test_a_capped_head_is_found_among_other_outputs_by_the_name_of_its_own(tmp_path: Path) -> None:
    """Two outputs have a row a token; the one called logits is capped behind its product."""

    def change(model: ir.Model) -> None:
        (logits,) = model.graph.outputs
        head = logits.producer()
        assert head is not None
        logits.name = "raw"
        cap = add_weight(model, "cap", (1,))
        capped = ir.node(
            "Mul", [logits, cap], name="capped", outputs=[ir.Value(name="logits", type=logits.type, shape=logits.shape)]
        )
        other = ir.node(
            "MatMul", [head.inputs[0], add_weight(model, "other", (32, 80))], name="other", outputs=[ir.Value(name="x")]
        )
        other.outputs[0].type = logits.type
        model.graph.extend([other, capped])
        model.graph.outputs[:] = [other.outputs[0], capped.outputs[0]]

    found = inferred("torch-llama-eager", tmp_path, change)
    assert [one.name for one in found.unknown] == ["other"]
    assert found.matrices[-1].roles == ("head",) and found.matrices[-1].matrix.name != "other"
