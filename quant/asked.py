"""Exceptions that a person asks for: PATTERN=BITS or PATTERN=BITS/GROUP, a shell pattern over the names of weights.

Knows: how one is read, which weights it fits, what the record says of them. Does not know: where a model comes from, what a form
can be held by (`quant.plan` refuses what cannot).

    *.v_proj.weight=8/32    8 bits in groups of 32        *.v_proj.weight=8    8 bits in the scheme's groups
    *.0.*=0                 the whole first layer float
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import onnx_ir as ir

from appliance.bundle.vocabulary import FLOAT_ROLES
from appliance.errors import BadInput
from appliance.targets.capabilities import Target
from quant.plan import Plan, plans
from quant.scheme import Scheme, WeightRule

_FORM = re.compile(r"(?P<bits>[048])(/(?P<group>\d{1,6}))?")
_NEAR = 3
"""Names that an error gives."""


@dataclass(frozen=True)
class Asked:
    """One exception.

    Attributes:
        text: as it was written.
        pattern: over names of weights: *, ?, [...]; upper and lower case differ.
        bits: 4, 8, or 0 for float.
        group: None leaves the scheme's.
    """

    text: str
    pattern: str
    bits: int
    group: int | None = None


def read(text: str) -> Asked:
    """Read PATTERN=BITS[/GROUP].

    Raises:
        BadInput: it is something else; it is shown.
    """
    pattern, equals, form = text.rpartition("=")
    found = _FORM.fullmatch(form)
    if not (pattern and equals and found) or (found["bits"] == "0" and found["group"]):
        raise BadInput(
            f"--exception {text} is no PATTERN=BITS or PATTERN=BITS/GROUP",
            "BITS is 4, 8, or 0 for float without a group: *.v_proj.weight=8/32",
        )
    return Asked(text, pattern, int(found["bits"]), int(found["group"]) if found["group"] else None)


def rules(asked: Sequence[Asked], plans: Sequence[Plan]) -> dict[str, WeightRule]:
    """A rule for every weight that one of the patterns fits; where several do, the last one counts.

    Args:
        plans: of the model, for any target.

    Raises:
        BadInput: a pattern fits no weight, or only such as always stay float.
    """
    found: dict[str, WeightRule] = {}
    for one in asked:
        fitting = [plan for plan in plans if fnmatchcase(plan.name, one.pattern)]
        if not fitting:
            raise BadInput(f"--exception {one.text}: no weight is called so", near(one.pattern, [plan.name for plan in plans]))
        chosen = [plan for plan in fitting if not set(plan.roles) & FLOAT_ROLES]
        if not chosen:
            raise BadInput(f"--exception {one.text}: {fitting[0].name} always stays float", "leave it out")
        rule = WeightRule(f"asked for: --exception {one.text}", bits=one.bits, group=one.group)
        found.update({plan.name: rule for plan in chosen})
    return found


def applied(asked: Sequence[Asked], model: ir.Model, scheme: Scheme, target: Target) -> Scheme:
    """The scheme with a rule for every weight of a canonical model that a pattern fits. No chooser touches those afterwards.

    Args:
        target: any that the model is made for.

    Raises:
        BadInput: as `rules`.
    """
    if not asked:
        return scheme
    found = rules(asked, plans(model, scheme, target))
    return replace(scheme, options=replace(scheme.options, weights={**scheme.options.weights, **found}))


def near(pattern: str, names: Sequence[str]) -> str:
    """A hint: names of which some part looks like the pattern without its wildcards."""
    plain = re.sub(r"[*?\[\]]+", "", pattern).strip(".")
    words = plain.count(".") + 1
    parts: dict[str, str] = {}
    for name in names:
        split = name.split(".")
        for start in range(len(split) - words, -1, -1):
            parts.setdefault(".".join(split[start : start + words]), name)
    alike = dict.fromkeys(parts[part] for part in difflib.get_close_matches(plain, list(parts), n=_NEAR, cutoff=0.5))
    return f"near to it: {', '.join(alike)}" if alike else f"names are like {', '.join(list(names)[:_NEAR])}"
