"""What a target can do, as data: one TOML file a target, read into one frozen object.

Knows: the keys of a target file. Does not know: any provider's code or any architecture.
`export/lower`, `quant` and `runtime` ask these flags and never compare a target's or a provider's name.
"""

from typing import Literal

from pydantic import Field

from appliance.strict import StrictModel


class WeightForms(StrictModel):
    """Which quantized weights the target's matrix operator takes."""

    operator: Literal["MatMulNBits", "DequantizeLinear"] = Field(
        description="MatMulNBits: the contrib operator; DequantizeLinear: opset-21 Q/DQ around a plain MatMul."
    )
    elements: tuple[Literal["int", "mxfp4"], ...] = Field(
        default=("int",), description="int: whole numbers; mxfp4: Microscaling FP4 in blocks of 32 with a power of two each."
    )
    bits: tuple[int, ...] = (4, 8)
    groups: tuple[int, ...] = Field(default=(32, 64, 128), description="0 = one scale a row.")
    symmetric_only: bool = False
    scale_dtype: Literal["float16", "float32"] = Field(default="float16", description="Form of the scales on disk.")


class Flags(StrictModel):
    """Capability flags. `False` means that a lowering must rewrite it."""

    form: Literal["dynamic", "static"]
    contrib_ops: bool = Field(description="GroupQueryAttention, Skip/SimplifiedLayerNormalization, GatherBlockQuantized.")
    rms_normalization: bool = Field(default=False, description="ai.onnx RMSNormalization(23); decomposed otherwise.")
    attention: Literal["contrib", "standard", "decomposed"]
    quantized_embedding: bool = Field(default=False, description="Embedding rows are dequantized inside the graph.")
    activations: tuple[str, ...] = Field(description="Granularities its matrix operator computes in, best first.")
    kv_dtypes: tuple[str, ...] = Field(
        default=("float32",),
        description="How attention can keep keys and values; int8 = with one static scale for each head and channel.",
    )
    state_update: Literal["inplace", "append"]
    max_context: int = Field(default=0, ge=0, description="0 = whatever the model allows.")


class Target(StrictModel):
    """One target file."""

    name: str = ""
    summary: str
    provider: str = Field(description="File in appliance/runtime/providers that opens its sessions.")
    device: str = Field(default="", description="Device filter handed to the provider.")
    options: dict[str, str] = Field(default_factory=dict, description="Options as the provider takes them.")
    default_scheme: str = "w4a8-mixed"
    chunk: int = Field(default=512, ge=1)
    context: int = Field(default=0, ge=0, description="Default length of fixed buffers in static graphs; 0 = the model's.")
    flags: Flags
    weights: WeightForms
    role_overrides: dict[str, dict[str, int]] = Field(default_factory=dict, description='e.g. {"head": {"bits": 8}}.')
