"""Which form a role gets."""

import pytest

from appliance import targets
from appliance.bundle.vocabulary import FLOAT_ROLES, ROLES
from appliance.errors import TargetError
from quant.scheme import FLOAT, Form, Options, WeightRule
from quant.schemes import find, known


def test_every_file_is_a_scheme_under_its_own_name() -> None:
    assert {"float", "w4a8", "w4a8-rtn", "w8a8"} <= set(known())
    for name in known():
        assert find(name).name == name and find(name).summary


def test_every_target_names_a_scheme_that_exists() -> None:
    for name in targets.names():
        assert targets.load(name).default_scheme in known()


def test_an_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(TargetError, match='unknown scheme "w4a9"; did you mean "w4a8"'):
        find("w4a9")


def test_roles_choose_the_form() -> None:
    scheme = find("w4a8")
    assert scheme.form("mlp.down") == Form(4, 64, "block-dynamic")
    assert scheme.form("head") == scheme.form("embed") == Form(8, 64, "block-dynamic")
    assert {find("float").form(role) for role in ROLES} == {FLOAT}
    assert {find("w8a8").form(role).bits for role in ROLES - FLOAT_ROLES} == {8}


@pytest.mark.parametrize("name", ["w4a8", "w8a8", "float"])
def test_some_roles_stay_float_in_every_scheme(name: str) -> None:
    assert {find(name).form(role) for role in FLOAT_ROLES} == {FLOAT}


def test_options_win_over_the_target_and_the_target_over_the_scheme() -> None:
    target = {"mlp.down": {"bits": 8, "group": 32}, "head": {"group": 128}}
    scheme = find("w4a8", Options(group=128, roles={"mlp.down": {"group": 64}, "attn.v": {"bits": 0}}))
    assert scheme.form("mlp.down", target) == Form(8, 64, "block-dynamic")
    assert scheme.form("head", target) == Form(8, 128, "block-dynamic")
    assert scheme.form("attn.v", target) == FLOAT
    assert scheme.form("attn.q", target) == Form(4, 128, "block-dynamic")
    assert find("float", Options(roles={"head": {"bits": 8}})).form("head") == Form(8, 64, "block-dynamic")
    assert find("float", Options(group=32)).form("attn.q") == FLOAT


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"mlp.dwon": {"bits": 8}}, 'unknown role "mlp.dwon"; did you mean "mlp.down"'),
        ({"mlp.down": {"bit": 8}}, 'unknown key "bit"'),
        ({"mlp.down": {"bits": 3}}, "asks for 3 bits"),
        ({"norm": {"bits": 8}}, "role norm always stays float"),
    ],
)
def test_a_wrong_rule_is_named(rules: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        find("w4a8", Options(roles=rules)).form("attn.q")


def test_a_rule_for_one_weight_wins_over_all_and_keeps_its_reason() -> None:
    rule = WeightRule("worst of its layer", bits=8, group=32)
    scheme = find("w4a8", Options(group=128, roles={"mlp.down": {"bits": 0}}, weights={"a.weight": rule}))
    assert scheme.form("mlp.down", None, "a.weight") == Form(8, 32, "block-dynamic")
    assert scheme.form("mlp.down", None, "b.weight") == FLOAT
    assert scheme.reason("mlp.down", {}, "npu", "a.weight") == "worst of its layer"
    assert scheme.reason("mlp.down", {}, "npu", "b.weight") == "the options ask for it, of all mlp.down"


def test_a_target_is_the_reason_where_it_changes_a_form_and_only_there() -> None:
    scheme = find("w4a8", Options(group=64))
    target = {"mlp.down": {"bits": 8}, "head": {"bits": 8, "group": 64}, "attn.v": {"bits": 0}}
    told = {role: scheme.reason(role, target, "npu", "a.weight") for role in ("mlp.down", "head", "attn.v", "attn.q", "norm")}
    assert told == {
        "mlp.down": "target npu asks for it, of all mlp.down", "attn.v": "target npu asks for it, of all attn.v",
        "head": "", "attn.q": "", "norm": "",
    }  # fmt: skip


def test_options_of_the_whole_model_are_a_reason_where_they_change_a_form_and_only_there() -> None:
    scheme = find("w4a8", Options(group=32, symmetric=False))
    both = "asked for: --group 32; asked for: --asymmetric"
    told = {role: scheme.reason(role, {}, "cpu", "a.weight") for role in ("attn.q", "head", "embed", "norm")}
    assert told == {"attn.q": both, "head": "asked for: --group 32", "embed": "asked for: --group 32", "norm": ""}
    assert find("w4a8", Options(group=64)).reason("attn.q", {}, "cpu", "a.weight") == "", "the scheme's own group"
    assert find("w8a8", Options(symmetric=False)).reason("attn.q", {}, "cpu", "a.weight") == "", "8 bits have no zero points"
    assert find("float", Options(group=32, symmetric=False)).reason("attn.q", {}, "cpu", "a.weight") == ""


def test_an_exception_of_its_own_stands_before_what_the_whole_model_was_asked_for() -> None:
    rules = {"a.weight": WeightRule("mine", bits=4), "b.weight": WeightRule("mine", 4, 128, True)}
    stored = {"c.weight": WeightRule("carried over", stored=Form(4, 32, "float", False))}
    scheme = find("w4a8", Options(group=32, symmetric=False, weights={**rules, **stored}, roles={"attn.v": {"bits": 4}}))
    told = {name: scheme.reason("mlp.up", {}, "cpu", f"{name}.weight") for name in "abc"}
    assert told == {"a": "mine; asked for: --group 32; asked for: --asymmetric", "b": "mine", "c": "carried over"}
    assert (
        scheme.reason("attn.v", {"attn.v": {"group": 64}}, "npu", "d.weight")
        == "target npu asks for it, of all attn.v; asked for: --asymmetric"
    )


@pytest.mark.parametrize(("name", "some"), [("w4a8", True), ("w4a8-mixed", True), ("w8a8", False), ("float", False)])
def test_which_schemes_have_weights_for_zero_points(name: str, some: bool) -> None:
    assert find(name).has_four_bits is some


def test_zero_points_are_for_four_bits_of_the_body() -> None:
    scheme = find("w4a8", Options(symmetric=False, roles={"mlp.up": {"bits": 8}, "head": {"bits": 4}}))
    assert not scheme.form("attn.q").symmetric
    assert scheme.form("mlp.up").symmetric and scheme.form("head").symmetric and scheme.form("norm").symmetric
