"""The state spec: what a token of context costs, and integers that name their scales."""

import numpy as np
import pytest
from pydantic import ValidationError

from appliance.bundle.manifest import StateTensor, Variant
from appliance.runtime.state import resolve


def tensor(name: str, dtype: str, **changes: object) -> StateTensor:
    said = {
        "name": name, "kind": "kv.key", "layer": 0, "input": name, "output": f"{name}.out", "dtype": dtype,
        "quantization": "channel" if dtype == "int8" else "none", "shape": ("batch", 3, "context", 64), "growth": "growing",
        "update": "inplace",
    }  # fmt: skip
    return StateTensor.model_validate({**said, **changes})


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_token_costs_what_one_more_row_of_the_buffers_takes(dtype: str) -> None:
    state = (tensor("a", dtype), tensor("b", dtype, shape=(1, 5, "context", 32)), tensor("conv", "float32", growth="fixed"))
    one, two = (sum(int(np.prod(resolve(part, 1, tokens).shape)) for part in state[:2]) for tokens in (1, 2))
    variant = Variant(target="cpu", form="dynamic", graphs={"model": "m"}, chunk=1, context=9, activation="float", state=state)
    assert variant.bytes_a_token == (two - one) * np.dtype(dtype).itemsize


def test_integers_without_scales_and_scales_without_integers_are_refused() -> None:
    for dtype, quantization in (("int8", "none"), ("float32", "channel")):
        with pytest.raises(ValidationError, match="integers alone have scales"):
            tensor("a", dtype, quantization=quantization)
