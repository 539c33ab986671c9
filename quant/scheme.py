"""What a scheme is: by role, how a matrix's weights are kept and in what its activations are computed, and who solves them.

Knows: forms, options and which of two rules wins. Does not know: any one scheme (`quant/schemes`), graphs or arrays.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from appliance.bundle.vocabulary import FLOAT_ROLES, ROLES
from appliance.errors import TargetError
from quant.band import Band

RoleRules = Mapping[str, Mapping[str, int]]
"""Exceptions by role, as target files and options write them: {"mlp.down": {"bits": 8}}; keys bits and group."""

STORED = "stored"
"""The solver of weights whose integers the checkpoint holds already."""

TABLES = ("embed", "head")
"""Roles of the matrices with one row a word: they are no part of the body, whose size a budget is about."""


@dataclass(frozen=True)
class Form:
    """How one matrix is kept.

    Attributes:
        bits: 4 or 8; 0 = float, as the checkpoint has it.
        group: neighbours along a row that share a scale; 0 = the whole row.
        activation: one of `vocabulary.ACTIVATIONS`.
        symmetric: value = q * scale; otherwise every group has a zero point too.
        offsets: every group has an offset, a float number: value = (q + 2^(bits-1)) * scale + offset. Only what is carried over
            from a checkpoint has them.
        element: "int" = whole numbers; "mxfp4" = Microscaling FP4, see `quant.mx`.
    """

    bits: int
    group: int
    activation: str
    symmetric: bool = True
    offsets: bool = False
    element: Literal["int", "mxfp4"] = "int"


FLOAT = Form(bits=0, group=0, activation="float")


@dataclass(frozen=True)
class WeightRule:
    """An exception for one weight, with the reason that the record will give. None leaves what the scheme says.

    Attributes:
        stored: the weight is carried over as the checkpoint holds it, in this form (its activation is left to the scheme).
    """

    reason: str
    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None
    stored: Form | None = None


@dataclass(frozen=True)
class Options:
    """What a person or a chooser may change of a scheme.

    Attributes:
        group: of every matrix.
        roles: exceptions by role.
        symmetric: False = zero points for the 4-bit matrices of the body (embedding and head have 8 bits and gain nothing).
        weights: exceptions by the weight's name; they win over everything else.
        kv: how attention keeps keys and values: "float32", or "int8" with one static scale for each head and channel.
    """

    group: int | None = None
    roles: RoleRules = field(default_factory=dict)
    symmetric: bool = True
    weights: Mapping[str, WeightRule] = field(default_factory=dict)
    kv: str = "float32"


@dataclass(frozen=True)
class Measured:
    """What the choice for weights that share a form was made from.

    Attributes:
        weights: names.
        kl: nats a token that the model loses when these alone are quantized, in the form of their plan (`quant.sensitivity`).
        expected: the forms they could have, and the KL that was expected of each.
    """

    weights: tuple[str, ...]
    kl: float
    expected: Mapping[Form, float]


@dataclass(frozen=True)
class Scheme:
    """One scheme.

    Attributes:
        default: the form of every linear whose role is not in `roles`.
        solver: file in `quant/solvers` that finds the integers of the body. One that needs calibration is not asked for the
            tables: they have 8 bits, where all solvers agree.
        budget: bits a body weight, scales included, that a chooser may spend on exceptions; None = no exceptions are chosen.
        budget_grows: a model so narrow that its smallest forms take more than the budget gets those; False = it is refused.
        band: what a bundle may lose at most; beyond it, it is taken for broken.
        reshape: whether the float model is rotated where its graph allows that, and equalized (`quant.reshape`), first.
        wide: share of the products of all linears with static 8-bit activations that may have 16-bit ones instead, where 8 cost
            most.
        measured: what a chooser bought the exceptions by, in the order of the model. Not in the `repr`, which names results on
            disk.
    """

    name: str
    summary: str
    default: Form
    roles: Mapping[str, Form] = field(default_factory=dict)
    options: Options = Options()
    solver: str = "fit"
    budget: float | None = None
    budget_grows: bool = False
    band: Band = field(default_factory=Band)
    reshape: bool = False
    wide: float = 0.0
    measured: tuple[Measured, ...] = field(default=(), repr=False)

    def form(self, role: str, target: RoleRules | None = None, weight: str = "") -> Form:
        """The form of `role`, or of the one weight of that role called `weight`.

        Later rules win: the scheme, the group option, the target's overrides, the role options, the weight's own.

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
        own = self.options.weights.get(weight)
        if own is not None and own.stored is not None:
            return replace(own.stored, activation=form.activation)
        if own is not None:
            changes = {key: value for key, value in (("bits", own.bits), ("group", own.group)) if value is not None}
            form = _ruled(form, role, {role: changes}, f"scheme {self.name} with its exception for {weight}")
        symmetric = self.options.symmetric if own is None or own.symmetric is None else own.symmetric
        return replace(form, symmetric=symmetric or form.bits != 4 or form.element != "int" or role in TABLES)

    def solver_of(self, weight: str) -> str:
        """Who finds the integers of a weight of the body: the scheme's solver, or nobody where the checkpoint has them."""
        own = self.options.weights.get(weight)
        return STORED if own is not None and own.stored is not None else self.solver

    def reason(self, role: str, target: RoleRules, name: str, weight: str) -> str:
        """Why the weight of that role is an exception for the target called `name`; "" when it is none.

        Options of the whole model that its form owes something to are named after what is about its role or itself.
        """
        own = self.options.weights.get(weight)
        told = own.reason if own is not None else self._reason_of_role(role, target, name)
        return "; ".join(filter(None, (told, *self._asked(role, target, weight))))

    def _reason_of_role(self, role: str, target: RoleRules, name: str) -> str:
        form = self.form(role, target)
        if form != self._with(replace(self.options, roles={})).form(role, target):
            return f"the options ask for it, of all {role}"
        return f"target {name} asks for it, of all {role}" if form != self.form(role) else ""

    def _asked(self, role: str, target: RoleRules, weight: str) -> list[str]:
        """The options of the whole model without which the weight would have another form."""
        form, found = self.form(role, target, weight), []
        if form.group != self._with(replace(self.options, group=None)).form(role, target, weight).group:
            found.append(f"asked for: --group {self.options.group}")
        if form.symmetric != self._with(replace(self.options, symmetric=True)).form(role, target, weight).symmetric:
            found.append("asked for: --asymmetric")
        return found

    def _with(self, options: Options) -> "Scheme":
        return replace(self, options=options)

    @property
    def has_four_bits(self) -> bool:
        """Whether it gives any role a form that can have zero points."""
        forms = (self.default, *(form for role, form in self.roles.items() if role not in TABLES))
        return any(form.bits == 4 and form.element == "int" for form in forms)


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
