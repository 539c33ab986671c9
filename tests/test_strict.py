"""Strict reading: one sentence that names the key, the nearest right one and the place."""

from collections.abc import Mapping

import pydantic
import pytest

from appliance.errors import BadInput, ConfigError
from appliance.strict import StrictModel, read


class Inner(StrictModel):
    size: int
    colour: str = "red"


class Outer(StrictModel):
    name: str
    inner: Inner
    several: tuple[Inner, ...] = ()
    by_name: Mapping[str, Inner] = pydantic.Field(default_factory=dict)
    either: Inner | None = None


GOOD = {"name": "x", "inner": {"size": 1}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"colour": 1}, 'file.toml: unknown key "colour"; known keys: by_name, either, inner, name, several'),
        ({"sevral": []}, 'file.toml: unknown key "sevral"; did you mean "several"?'),
        ({"inner": {"size": 1, "color": ""}}, 'file.toml: unknown key "inner.color"; did you mean "colour"?'),
        ({"several": [{"size": 1, "color": ""}]}, 'file.toml: unknown key "several.0.color"; did you mean "colour"?'),
        ({"by_name": {"a": {"size": 1, "color": ""}}}, 'file.toml: unknown key "by_name.a.color"; did you mean "colour"?'),
        ({"either": {"size": 1, "color": ""}}, 'file.toml: unknown key "either.color"; did you mean "colour"?'),
        ({"inner": {}}, 'file.toml: key "inner.size" is missing'),
        ({"inner": {"size": "many"}}, 'file.toml: "inner.size": input should be a valid integer, unable to parse string'),
        ({"name": None}, 'file.toml: "name": input should be a valid string'),
    ],
)
def test_one_sentence_says_what_and_where(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(Outer, {**GOOD, **change}, "file.toml", ConfigError)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"nmae": "x", "inner": {"size": 1}}, 'request: unknown key "nmae"; did you mean "name"?'),
        ({"name": "x", "inner": {"sise": 1}}, 'request: unknown key "inner.sise"; did you mean "size"?'),
        (
            {"name": "x", "inner": {"size": 1}, "several": [{"Size": 1}]},
            'request: unknown key "several.0.Size"; did you mean "size"?',
        ),
        # A key that is missing here and another that is unknown elsewhere have nothing to do with each other.
        ({"inner": {"size": 1, "color": ""}}, 'request: key "name" is missing'),
    ],
)
def test_a_mistyped_required_key_is_named_before_the_one_that_is_missing(data: dict[str, object], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(Outer, data, "request")
    assert str(caught.value) == says


def test_what_is_right_is_read() -> None:
    assert read(Outer, GOOD, "file.toml") == Outer(name="x", inner=Inner(size=1))


def test_a_list_is_called_a_list() -> None:
    with pytest.raises(ConfigError) as caught:
        read(Outer, GOOD | {"several": "one"}, "file.toml", ConfigError)
    assert str(caught.value).endswith('"several": input should be a list')
