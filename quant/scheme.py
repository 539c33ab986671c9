"""What a scheme is: by role, how a matrix's weights are kept and in what its activations are computed.

Knows: forms, options and which of two rules wins. Does not know: any one scheme (`quant/schemes`), graphs or arrays.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from appliance.bundle.vocabulary import FLOAT_ROLES, ROLES
from appliance.errors import TargetError

RoleRules = Mapping[str, Mapping[str, int]]
"""Exceptions by role, as target files and options write them: {"mlp.down": {"bits": 8}}; keys bits and group."""


@dataclass(frozen=True)
class Form:
    """How one matrix is kept.

    Attributes:
        bits: 4 or 8; 0 = float, as the checkpoint has it.
        group: neighbours along a row that share a scale; 0 = the whole row.
        activation: one of `vocabulary.ACTIVATIONS`.
    """

    bits: int
    group: int
    activation: str


FLOAT = Form(bits=0, group=0, activation="float")


@dataclass(frozen=True)
class Options:
    """What a person may change of a scheme: the group of every matrix, and exceptions by role."""

    group: int | None = None
    roles: RoleRules = field(default_factory=dict)


@dataclass(frozen=True)
class Scheme:
    """One scheme. `default` is for every linear whose role is not in `roles`."""

    name: str
    summary: str
    default: Form
    roles: Mapping[str, Form] = field(default_factory=dict)
    options: Options = Options()

    def form(self, role: str, target: RoleRules | None = None) -> Form:
        """The form of `role`. Later rules win: the scheme, the group option, the target's overrides, the role options.

        Raises:
            TargetError: a rule names an unknown role or key, or quantizes what always stays float.
        """
        if role in FLOAT_ROLES:
            return FLOAT
        form = self.roles.get(role, self.default)
        if form.bits and self.options.group is not None:
            form = replace(form, group=self.options.group)
        for rules, where in ((target or {}, "the target"), (self.options.roles, "the options")):
            form = _ruled(form, role, rules, f"scheme {self.name} with {where}")
        return form


def _ruled(form: Form, role: str, rules: RoleRules, where: str) -> Form:
    for name, changes in rules.items():
        _check_rule(name, changes, where)
    changes = rules.get(role, {})
    if not changes:
        return form
    bits = changes.get("bits", form.bits)
    if bits == 0:
        return FLOAT
    activation = form.activation if form.bits else "block-dynamic"
    return Form(bits=bits, group=changes.get("group", form.group or 64), activation=activation)


def _check_rule(role: str, changes: Mapping[str, int], where: str) -> None:
    if role not in ROLES:
        raise TargetError(f'{where}: unknown role "{role}"', nearest(role, sorted(ROLES)))
    for key, value in changes.items():
        if key not in ("bits", "group"):
            raise TargetError(f'{where}: role {role} has the unknown key "{key}"', "known keys: bits, group")
        if key == "bits" and value not in (0, 4, 8):
            raise TargetError(f"{where}: role {role} asks for {value} bits", "choose 4, 8, or 0 for float")
    if role in FLOAT_ROLES and changes.get("bits", 0):
        raise TargetError(f"{where}: role {role} always stays float", "leave it out")


def nearest(word: str, known: list[str]) -> str:
    """A hint for a misspelt name."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f'did you mean "{near[0]}"?' if near else f"known: {', '.join(known)}"
