"""Exceptions by name: how they are read, what they fit, what is refused."""

import numpy as np
import pytest

from appliance.errors import BadInput
from quant.asked import Asked, near, read, rules
from quant.plan import Plan, plans
from quant.scheme import WeightRule
from quant.schemes import find
from tests.quant.canonical import Weight, linear_model, target, tied_model


def planned() -> tuple[Plan, ...]:
    """embed.weight, gate.weight, up.weight."""
    return plans(tied_model(np.zeros((50, 96), np.float32)), find("w4a8"), target("cpu"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("*.v_proj.weight=8/32", ("*.v_proj.weight", 8, 32)),
        ("a=b*=4", ("a=b*", 4, None)),
        ("*=0", ("*", 0, None)),
        ("*=8/0", ("*", 8, 0)),
    ],
)
def test_one_is_read(text: str, wanted: tuple[str, int, int | None]) -> None:
    assert read(text) == Asked(text, *wanted)


@pytest.mark.parametrize("text", ["", "a", "=8", "a=", "a=5", "a=48", "a=8/", "a=8/x", "a=0/32", "a=-4", "a=8/32/1", "a=8 "])
def test_what_is_none_is_shown(text: str) -> None:
    with pytest.raises(BadInput, match="BITS is 4, 8, or 0") as caught:
        read(text)
    assert f"--exception {text} is no" in str(caught.value) and "\n" not in str(caught.value)


def test_every_weight_that_fits_gets_the_rule_and_the_last_one_counts() -> None:
    found = rules([read("*=8/32"), read("up.*=0")], planned())
    assert found == {
        "embed.weight": WeightRule("asked for: --exception *=8/32", 8, 32),
        "gate.weight": WeightRule("asked for: --exception *=8/32", 8, 32),
        "up.weight": WeightRule("asked for: --exception up.*=0", 0),
    }


def test_a_pattern_that_fits_nothing_names_what_is_near() -> None:
    with pytest.raises(BadInput, match=r"--exception \*gat.weight=8: no weight is called so; near to it: gate.weight"):
        rules([read("*=8"), read("*gat.weight=8")], planned())
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(3) for part in "qkvo"]
    assert near("*.v_prj.weight", names).startswith("near to it: model.layers.0.self_attn.v_proj.weight")
    assert near("*xyz*", names) == f"names are like {', '.join(names[:3])}"


def test_what_always_stays_float_is_refused() -> None:
    router = plans(
        linear_model(Weight("router.weight", "moe.router", np.zeros((8, 64), np.float32))), find("w4a8"), target("cpu")
    )
    with pytest.raises(BadInput, match=r"router\.weight always stays float"):
        rules([read("*=8")], router)
    assert rules([read("*=8")], [*router, *planned()]).keys() == {"embed.weight", "gate.weight", "up.weight"}
