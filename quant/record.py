"""What quantization did, for `record.json` and the manifest: sizes, errors, what stayed float and why.

Knows: a `Decision`. Does not know: graphs, or quality on text (`quant.evaluate` measures that on a bundle).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from appliance.bundle.manifest import SchemeSummary, WeightForm
from quant.budget import bytes_of
from quant.decide import Decision, Kept, Matrix
from quant.scheme import Form, Measured, Options, WeightRule
from quant.static import Ranges, activation_of


def matrix_bytes(matrix: Matrix, scale_dtype: str = "float16") -> int:
    """Bytes in the file: packed integers, the padding of partial groups included, scales, zero points, offsets."""
    return bytes_of(matrix.rows, matrix.columns, matrix.form, scale_dtype)


def with_ranges(decision: Decision, ranges: Mapping[str, Ranges]) -> Decision:
    """The decision with the activations that each matrix has by its ranges, which may be wider than the scheme's.

    Args:
        ranges: by the weight's name.
    """

    def own(matrix: Matrix) -> Matrix:
        found = ranges.get(matrix.name)
        if found is None:
            return matrix
        form = replace(matrix.form, activation=activation_of(found.input))
        return replace(matrix, form=form, activation_reason=found.reason)

    return replace(decision, matrices=tuple(map(own, decision.matrices)))


def record(decision: Decision, scale_dtype: str = "float16") -> dict[str, Any]:
    """The part of `record.json` that tells of weights: plain JSON values.

    Args:
        scale_dtype: how the target keeps scales (`WeightForms.scale_dtype`).
    """
    matrices, kept = decision.matrices, decision.kept
    tables = [matrix for matrix in matrices if set(matrix.roles) & {"embed", "head"}]
    body = [matrix for matrix in matrices if matrix not in tables]
    in_body = [one for one in kept if one.parameters and one.role not in ("embed", "head")]
    scheme = decision.scheme
    measured = {name: unit for unit in scheme.measured for name in unit.weights}
    return {
        "scheme": scheme.name,
        "options": _options(scheme.options),
        "solver": scheme.solver,
        "budget": scheme.budget,
        "wide": scheme.wide,
        "target": decision.target,
        "parameters": decision.parameters,
        "bits_per_weight": _bits(matrices, kept, scale_dtype),
        "bits_per_body_weight": _bits(body, in_body, scale_dtype),
        "bytes_by_role": _bytes_by_role(decision, scale_dtype),
        "activations": _activations(decision),
        "snr_db_by_role": _snr_by_role(matrices),
        "matrices": [_matrix(matrix, scale_dtype) | _cost(matrix.name, measured.get(matrix.name)) for matrix in matrices],
        "float": [
            {"name": one.name, "role": one.role, "shape": list(one.shape), "bytes": one.bytes, "reason": one.reason}
            for one in kept
        ],
    }


def summary(decision: Decision, scale_dtype: str = "float16") -> SchemeSummary:
    """The manifest's view: one form a role. A tied matrix counts under its first role; its others show 0 bytes.

    Where exceptions give a role several forms, the one that most of its weights have; `record` has them all.
    """
    roles: dict[str, WeightForm] = {}
    common = _common_forms(decision.matrices)
    for matrix in decision.matrices:
        for index, role in enumerate(matrix.roles):
            old = roles.get(role)
            mine = index == 0
            roles[role] = WeightForm(
                bits=common[role].bits,
                group=common[role].group,
                symmetric=common[role].symmetric,
                activation=common[role].activation,
                bytes=(old.bytes if old else 0) + (matrix_bytes(matrix, scale_dtype) if mine else 0),
                parameters=(old.parameters if old else 0) + (matrix.parameters if mine else 0),
            )
    for one in decision.kept:
        if not one.parameters:
            continue
        old, count = roles.get(one.role), one.parameters
        roles[one.role] = WeightForm(
            bits=8 * one.bytes // count,
            group=0,
            activation="float",
            bytes=(old.bytes if old else 0) + one.bytes,
            parameters=(old.parameters if old else 0) + count,
        )
    return SchemeSummary(name=decision.scheme.name, roles=dict(sorted(roles.items())))


def _common_forms(matrices: Iterable[Matrix]) -> dict[str, Form]:
    counts: dict[str, dict[Form, int]] = defaultdict(lambda: defaultdict(int))
    for matrix in matrices:
        for role in matrix.roles:
            counts[role][matrix.form] += matrix.parameters
    return {role: max(forms, key=lambda form: forms[form]) for role, forms in counts.items()}


def _options(options: Options) -> dict[str, Any]:
    return {
        "group": options.group,
        "symmetric": options.symmetric,
        "kv": options.kv,
        "roles": {role: dict(changes) for role, changes in options.roles.items()},
        "weights": {name: _rule(rule) for name, rule in sorted(options.weights.items()) if rule.stored is None},
    }


def _rule(rule: WeightRule) -> dict[str, Any]:
    return {"reason": rule.reason, "bits": rule.bits, "group": rule.group, "symmetric": rule.symmetric}


def _bits(matrices: Iterable[Matrix], kept: Iterable[Kept], scale_dtype: str) -> float | None:
    """Bytes of all these tensors x 8 / parameters. None when there are no parameters."""
    matrices, kept = list(matrices), list(kept)
    count = sum(matrix.parameters for matrix in matrices) + sum(one.parameters for one in kept)
    size = sum(matrix_bytes(matrix, scale_dtype) for matrix in matrices) + sum(one.bytes for one in kept)
    return round(8 * size / count, 4) if count else None


def _bytes_by_role(decision: Decision, scale_dtype: str) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for matrix in decision.matrices:
        sizes["+".join(matrix.roles)] += matrix_bytes(matrix, scale_dtype)
    for one in decision.kept:
        sizes[one.role or "constant"] += one.bytes
    return dict(sorted(sizes.items()))


def _activations(decision: Decision) -> dict[str, str]:
    """By role; where its matrices differ, of how many: "20 static-u8, 4 static-u16"."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for matrix in decision.matrices:
        for role in matrix.roles:
            counts[role][matrix.form.activation] += 1
    for one in decision.kept:
        if one.parameters:
            counts[one.role]["float"] += 1
    return {
        role: ", ".join(f"{count} {name}" for name, count in found.most_common()) if len(found) > 1 else next(iter(found))
        for role, found in sorted(counts.items())
    }


def _snr_by_role(matrices: Iterable[Matrix]) -> dict[str, float | None]:
    """10 log10 of all the role's signal over all its noise."""
    signal: dict[str, float] = defaultdict(float)
    noise: dict[str, float] = defaultdict(float)
    for matrix in matrices:
        signal["+".join(matrix.roles)] += matrix.error.signal
        noise["+".join(matrix.roles)] += matrix.error.noise
    return {role: round(float(10 * np.log10(signal[role] / noise[role])), 3) if noise[role] else None for role in sorted(signal)}


def _cost(name: str, unit: Measured | None) -> dict[str, Any]:
    """What a budget chose the form of a matrix by; nulls and nothing where none did."""
    if unit is None:
        return {"cost_kl": None, "cost_with": [], "cost_by_form": {}}
    by_form = {said(form): float(f"{loss:.6g}") for form, loss in unit.expected.items()}
    others = [other for other in unit.weights if other != name]
    return {"cost_kl": float(f"{unit.kl:.6g}"), "cost_with": others, "cost_by_form": by_form}


def said(form: Form) -> str:
    """A form as `--exception` writes it, and whether it has zero points."""
    return f"{form.bits}/{form.group}{'' if form.symmetric else ' zero points'}"


def _matrix(matrix: Matrix, scale_dtype: str) -> dict[str, Any]:
    snr = matrix.error.snr_db
    return {
        "name": matrix.name,
        "roles": list(matrix.roles),
        "shape": [matrix.rows, matrix.columns],
        "bits": matrix.form.bits,
        "group": matrix.form.group,
        "symmetric": matrix.form.symmetric,
        "offsets": matrix.form.offsets,
        "element": matrix.form.element,
        "solver": matrix.solver,
        "fell_back": matrix.fell_back,
        "reason": matrix.reason,
        "proxy": None if matrix.proxy is None else float(f"{matrix.proxy:.6g}"),
        "plain_proxy": None if matrix.plain_proxy is None else float(f"{matrix.plain_proxy:.6g}"),
        "activation": matrix.form.activation,
        "activation_reason": matrix.activation_reason,
        "bytes": matrix_bytes(matrix, scale_dtype),
        "snr_db": None if snr is None else round(snr, 3),
        "saturation": round(matrix.error.saturation, 6),
    }
