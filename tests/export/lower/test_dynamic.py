"""The dynamic lowerings: which operators are left, what is packed, which rows get logits, where state is written."""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle import vocabulary
from appliance.errors import TargetError
from appliance.targets import load
from appliance.targets.capabilities import Target
from export import arch, parity
from export.blocks import ROPE_COS
from export.graph import Nodes, add_initializer, nodes_of, replace
from export.lower import lower, pack_qkv
from export.step import Step
from tests.golden import recipe

CONFIG = arch.find("llama").TINY["all"]
TARGETS: dict[str, Callable[[], Target]] = {"reference": parity.reference_target, "contrib": lambda: load("cpu")}
STEP = Step("dynamic", 0, 256)


@pytest.fixture
def seed() -> Iterator[int]:
    drawn = int(np.random.SeedSequence().generate_state(1)[0]) % 2**31
    print("seed", drawn)
    yield drawn


def opened(seed: int = 1, **config: Any) -> arch.Opened:
    said = {**CONFIG, **config}
    return arch.open_model(recipe.Memory(said, recipe.tensors(said, seed)))


def ops(model: ir.Model) -> collections.Counter[tuple[str, str]]:
    return collections.Counter((node.domain, node.op_type) for node in model.graph)


def test_the_reference_has_only_onnx_operators() -> None:
    import onnx

    model = lower(opened().build, parity.reference_target(), 0, 1).graphs["model"]
    assert set(model.graph.opset_imports) == {""}
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    assert {op for _, op in ops(model)} <= known


def test_rms_normalization_is_one_node_where_the_target_has_it(seed: int) -> None:
    target = parity.reference_target()
    flags = target.flags.model_copy(update={"rms_normalization": True})
    one, model = target.model_copy(update={"flags": flags}), opened(seed)
    lowered = lower(model.build, one, 0, 1)
    assert ops(lowered.graphs["model"])["", "RMSNormalization"] == 5
    ids = np.random.default_rng(seed).integers(0, 320, 20).tolist()
    found = parity.logits(parity.open_lowered(lowered), ids)
    np.testing.assert_allclose(found, parity.logits(parity.open_float(model, target), ids), atol=1e-4)


def test_the_contrib_form_is_fused() -> None:
    model = lower(opened().build, load("cpu"), 0, 1).graphs["model"]
    found = ops(model)
    assert found["com.microsoft", "GroupQueryAttention"] == 2
    assert found["com.microsoft", "SkipSimplifiedLayerNormalization"] == 4 and found["", "SimplifiedLayerNormalization"] == 1
    assert not found["", "Split"] and not found["", "Concat"] and not found["", "RMSNormalization"]
    assert found["", "MatMul"] == 2 * 5 + 1, "q, k and v are one product"


def test_packed_rows_say_whose_they_are(seed: int) -> None:
    model = opened(seed).build()
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    pack_qkv.run(model, load("cpu"), STEP)
    at = "model.layers.1.self_attn"
    weight = model.graph.initializers[f"{at}.qkv_proj.weight"]
    assert weight.metadata_props == {
        "parts": "attn.q:0:128,attn.k:128:160,attn.v:160:192", "stream": "layers.1.attn_in", "layer": "1",
    }  # fmt: skip
    assert weight.const_value is not None
    rows = weight.const_value.numpy()
    for part, first, end in (("q", 0, 128), ("k", 128, 160), ("v", 160, 192)):
        tensor = before[f"{at}.{part}_proj.weight"]
        assert tensor is not None and np.array_equal(rows[first:end], tensor.numpy())


def decide(model: ir.Model, bits: dict[str, int], group: int = 32) -> None:
    """Turn every Linear into a QuantLinear of random integers, `bits` by role."""
    graph = model.graph
    for node in nodes_of(graph, vocabulary.LINEAR):
        x, weight, *bias = node.inputs
        assert weight is not None and weight.shape is not None
        rows, columns = (int(size) for size in weight.shape)
        rng = np.random.default_rng(rows)
        made = []
        for kind, array in (
            ("q", rng.integers(-8, 8, (rows, columns)).astype(np.int8)),
            ("scales", rng.random((rows, -(-columns // group)), np.float32)),
        ):
            name = f"{weight.name}.{kind}"
            made.append(add_initializer(graph, name, ir.tensor(array, name=name), weight.metadata_props))
        attributes = {
            "bits": bits.get(weight.metadata_props["role"], 4), "group": group, "activation": "block-dynamic",
        }  # fmt: skip
        at = Nodes(graph, str(node.name), node)
        new = at.node(vocabulary.QUANT_LINEAR, [x, *made, *bias], attributes, domain=vocabulary.DOMAIN)
        replace(graph, node, new.outputs)


def test_decided_projections_of_one_form_are_packed() -> None:
    model = opened().build()
    decide(model, {})
    names = ("q_proj.weight.q", "k_proj.weight.q", "v_proj.weight.q")
    parts = [model.graph.initializers[f"model.layers.0.self_attn.{name}"].const_value for name in names]
    pack_qkv.run(model, load("cpu"), STEP)
    joined = model.graph.initializers["model.layers.0.self_attn.qkv_proj.weight.q"]
    assert joined.const_value is not None and joined.const_value.dtype == ir.DataType.INT8
    assert np.array_equal(joined.const_value.numpy(), np.concatenate([part.numpy() for part in parts if part is not None]))
    scales = model.graph.initializers["model.layers.0.self_attn.qkv_proj.weight.scales"]
    assert scales.shape is not None and tuple(scales.shape) == (192, 2)
    node = next(use.node for use in joined.uses())
    assert node.op_type == vocabulary.QUANT_LINEAR and node.attributes["bits"].as_int() == 4
    assert len(node.inputs) == 4, "the bias is joined too"


def test_projections_of_other_bits_are_not_packed() -> None:
    model = opened().build()
    decide(model, {"attn.v": 8})
    count = len(nodes_of(model.graph, vocabulary.QUANT_LINEAR))
    pack_qkv.run(model, load("cpu"), STEP)
    assert len(nodes_of(model.graph, vocabulary.QUANT_LINEAR)) == count
    lowered = lower(lambda: model, load("cpu"), 0, 1).graphs["model"]
    attention = next(node for node in lowered.graph if node.op_type == "GroupQueryAttention")
    assert attention.inputs[1] is not None and attention.inputs[2] is not None


@pytest.mark.parametrize("target", TARGETS)
def test_only_wanted_rows_get_logits(target: str, seed: int) -> None:
    """Whatever is kept, the rows are the last ones of all; the default is one."""
    model = parity.open_float(opened(seed), TARGETS[target](), threads=1)
    ids = np.random.default_rng(seed).integers(0, 320, 12).tolist()
    everything = parity.logits(model, ids)
    feeds = {
        "input_ids": np.array([ids], np.int64),
        "attention_mask": np.ones((1, 12), np.int64),
        **{one.input: np.zeros((1, one.shape[1], 0, one.shape[3]), np.float32) for one in model.lowered.state},
    }
    assert "logits_to_keep" not in {one.name for one in model.session.get_inputs()}
    (last,) = model.session.run(["logits"], feeds)
    np.testing.assert_allclose(last[0], everything[-1:], atol=2e-5)
    for keep in (1, 5, 12, 100):
        (found,) = model.session.run(["logits"], {**feeds, "logits_to_keep": np.array([keep], np.int64)})
        np.testing.assert_allclose(found[0], everything[-keep:], atol=2e-5, err_msg=str(keep))


def test_rows_are_dropped_right_behind_the_last_attention() -> None:
    """All that follows the last attention works on kept rows; the layer before does not."""
    graph = lower(opened().build, load("cpu"), 0, 1).graphs["model"].graph
    after = [node.name or "" for node in graph]
    last = max(index for index, name in enumerate(after) if name.endswith("keep_last/Slice_2"))
    assert "layers.1/attn/GroupQueryAttention" in after[last - 1]
    assert sum(node.op_type == "Slice" for node in graph) == 2


def test_new_rows_are_written_into_the_callers_buffers(seed: int) -> None:
    """Bound in place, rows before and behind the new ones keep their bits, and the new ones are the reference's."""
    import onnxruntime

    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 320, 20)
    model, joined = (parity.open_float(opened(seed), TARGETS[name](), threads=1) for name in ("contrib", "reference"))
    state = model.lowered.state
    assert {one.update for one in state} == {"inplace"} and {one.update for one in joined.lowered.state} == {"replace"}
    filled = {one.input: rng.standard_normal((1, 1, 32, 32)).astype(np.float32) for one in state}
    buffers = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in filled.items()}
    for first, end in ((0, 13), (13, 14), (14, 20)):
        binding = model.session.io_binding()
        binding.bind_cpu_input("input_ids", ids[None, first:end])
        binding.bind_cpu_input("attention_mask", np.ones((1, end), np.int64))
        for one in state:
            binding.bind_ortvalue_input(one.input, buffers[one.input])
            binding.bind_ortvalue_output(one.output, buffers[one.input])
        binding.bind_output("logits")
        model.session.run_with_iobinding(binding)
    feeds = {"input_ids": ids[None], "attention_mask": np.ones((1, 20), np.int64)}
    past = {one.input: np.zeros((1, 1, 0, 32), np.float32) for one in state}
    wanted = joined.session.run([one.output for one in state], {**feeds, **past})
    for one, rows in zip(state, wanted, strict=True):
        found = buffers[one.input].numpy()
        np.testing.assert_allclose(found[:, :, :20], rows, atol=1e-4, err_msg=one.name)
        assert np.array_equal(found[:, :, 20:], filled[one.input][:, :, 20:]), one.name


def test_sequences_of_a_batch_may_have_pasts_of_their_own(seed: int) -> None:
    """Two sequences of 9 and 5 tokens in buffers of 16, then one new token each: as each alone.

    One, because the kernel takes several new tokens over a past for a batch of one only.
    """
    model = parity.open_float(opened(seed), load("cpu"), threads=1)
    rng, state = np.random.default_rng(seed), model.lowered.state
    lengths, ids = (9, 5), rng.integers(0, 320, (2, 11))
    past = {one.input: np.zeros((2, 1, 16, 32), np.float32) for one in state}
    outputs = [one.output for one in state]
    for row, length in enumerate(lengths):
        alone = {name: array[row : row + 1] for name, array in past.items()}
        mask = np.ones((1, length), np.int64)
        made = model.session.run(outputs, {"input_ids": ids[row : row + 1, :length], "attention_mask": mask, **alone})
        for one, array in zip(state, made, strict=True):
            past[one.input][row] = array[0]
    mask = np.array([[1] * 10, [1] * 6 + [0] * 4], np.int64)
    fresh = np.stack([ids[row, length : length + 1] for row, length in enumerate(lengths)])
    (found,) = model.session.run(["logits"], {"input_ids": fresh, "attention_mask": mask, **past})
    for row, length in enumerate(lengths):
        wanted = parity.logits(model, ids[row, : length + 1].tolist())[-1]
        np.testing.assert_allclose(found[row, 0], wanted, atol=1e-4, err_msg=f"row {row}, seed {seed}")


def test_state_says_how_it_is_carried() -> None:
    state = lower(opened().build, load("cpu"), 128, 1).state
    assert [one.name for one in state] == ["layers.0.key", "layers.0.value", "layers.1.key", "layers.1.value"]
    third = state[3]
    assert (third.input, third.output) == ("past_key_values.1.value", "present.1.value")
    assert (third.kind, third.layer, third.shape) == ("kv.value", 1, ("batch", 1, "context", 32))
    assert (third.growth, third.update, third.dtype) == ("growing", "inplace", "float32")


def test_rope_tables_are_cut_to_the_context() -> None:
    whole = opened().build().graph.initializers[ROPE_COS].const_value
    lowered = lower(opened().build, load("cpu-static"), 96, 1)
    cut = lowered.graphs["decode"].graph.initializers[ROPE_COS].const_value
    assert whole is not None and cut is not None and lowered.context == 96
    assert tuple(whole.shape) == (256, 16) and np.array_equal(cut.numpy(), whole.numpy()[:96])


def test_a_context_that_the_model_cannot_hold_is_refused() -> None:
    with pytest.raises(TargetError, match="257 tokens is too long: model and target hold 256"):
        lower(opened().build, load("cpu"), 257, 1)
    cpu = load("cpu")
    small = cpu.model_copy(update={"flags": cpu.flags.model_copy(update={"max_context": 64})})
    with pytest.raises(TargetError, match="hold 64"):
        lower(opened().build, small, 65, 1)
    assert lower(opened().build, small, 0, 1).context == 64


def test_a_tied_head_reads_the_embedding() -> None:
    graph = opened(tie_word_embeddings=True).build().graph
    head = next(node for node in graph if node.name == "/lm_head/Linear")
    embedding = next(node for node in graph if node.op_type == vocabulary.EMBEDDING)
    assert head.inputs[1] is embedding.inputs[1]
    assert dict(head.metadata_props)["role"] == "head" and dict(embedding.metadata_props)["role"] == "embed"


def test_a_build_can_be_repeated() -> None:
    model = opened()
    names = [[(node.name, node.op_type) for node in lower(model.build, load("cpu"), 0, 1).graphs["model"].graph] for _ in "ab"]
    assert names[0] == names[1] and dataclasses.is_dataclass(model)
