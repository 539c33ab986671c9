"""Checks of a graph file right after it was written: does it hold the very numbers that were decided, and is none undecided?

Knows: a decided canonical model and the files made from it. Does not know: how a file is decoded (`quant.written`, which shares
no code with what wrote it), how integers were found.

    decided model - expected() -+
                                +- check(): integers, scales, zero points, offsets, padding; every matrix has a decision;
                                            all else as `quant.rest` has it
    model.onnx, weights.bin ----+

SmolLM2's 98 MB take about a second; memory is a few tens of MiB.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from appliance.bundle.vocabulary import EMBEDDING, LAYER, LINEAR, PARTS, QUANT_EMBEDDING, QUANT_LINEAR, ROLE
from appliance.errors import BundleError
from quant.decide import Matrix
from quant.graph import canonical, sizes, tensor_of
from quant.rest import AGAIN, Reading, Rest, rest_of
from quant.written import GraphFile, Piece, Written

LIMIT = 1e-3
"""Largest relative difference of a logit that a fold or a rotation may make before any rounding."""

_ENDINGS = (
    ".q4",
    ".q8",
    ".t4",
    ".t8",
    ".e2m1",
    ".e8m0",
    ".t",
    ".transposed",
    ".q",
    ".scales32",
    ".scales",
    ".zero_points",
    ".offsets",
)
"""What emission and lowering put after a weight's name, the outermost first."""


@dataclass(frozen=True)
class Decided:
    """One decided weight; its numbers are read when they are compared. Meanings as in `vocabulary.QUANT_LINEAR`."""

    name: str
    tags: Mapping[str, str]
    bits: int
    group: int
    q: ir.TensorProtocol
    scales: ir.TensorProtocol
    zero_points: ir.TensorProtocol | None
    offsets: ir.TensorProtocol | None

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K)."""
        return sizes(self.q)


@dataclass(frozen=True)
class Expected:
    """What a decided canonical model says must be in its files: by weight, what was decided, and the tags of those left float.

    Attributes:
        rest: all else; by default nothing else is compared.
    """

    decided: Mapping[str, Decided]
    floats: Mapping[str, Mapping[str, str]]
    rest: Rest = field(default_factory=Rest)

    def part(self, role: str, layer: str) -> Decided | str | None:
        """The one weight of that role in that layer: decided, or the name of a float one; None when there is no such one."""
        decided = [one for one in self.decided.values() if (one.tags.get(ROLE), one.tags.get(LAYER, "")) == (role, layer)]
        floats = [name for name, tags in self.floats.items() if (tags.get(ROLE), tags.get(LAYER, "")) == (role, layer)]
        found: list[Decided | str] = [*decided, *floats]
        return found[0] if len(found) == 1 else None


def expected(model: ir.Model) -> Expected:
    """Read off a decided canonical model; call it before lowering."""
    decided, floats = {}, {}
    for node in canonical(model.graph, QUANT_LINEAR, QUANT_EMBEDDING, LINEAR, EMBEDDING):
        weight = node.inputs[1]
        assert weight is not None
        if node.op_type in (LINEAR, EMBEDDING):
            floats[str(weight.name)] = dict(weight.metadata_props)
            continue
        name = str(weight.name).removesuffix(".q")
        rest = [node.inputs[index] if len(node.inputs) > index else None for index in (4, 5)]
        decided[name] = Decided(
            name,
            dict(weight.metadata_props),
            node.attributes["bits"].as_int(),
            node.attributes["group"].as_int(),
            tensor_of(weight, node),
            tensor_of(node.inputs[2], node),
            *(None if value is None else tensor_of(value, node) for value in rest),
        )
    return Expected(decided, floats, rest_of(model))


def check(files: Iterable[Path], wanted: Expected, kept: Iterable[str]) -> None:
    """Compare graph files that share a file of weights with what was decided for them.

    Args:
        files: saved graphs of one target.
        wanted: from `expected`.
        kept: names of the tensors that the decision accounts for as float.

    Raises:
        BundleError: the first weight that is not what it should be, by name, with where it differs.
    """
    if lost := sorted(set(wanted.floats) - set(kept)):
        raise BundleError(f"weight {lost[0]} is neither quantized nor accounted for as float", AGAIN)
    compared: set[tuple[object, ...]] = set()
    for path in files:
        file, met = GraphFile(path), set()
        reading = Reading(file, wanted.rest, compared)
        for written in file.matrices():
            parts = _parts(written, wanted, path)
            for part, rows in parts:
                met.add(part.name)
                _compare_scales(written, part, rows, path)
            if written.place not in compared:
                _compare_integers(written, parts, path)
                compared.add(written.place)
            reading.linear(written.node, [(part.name, rows) for part, rows in parts])
        if lost := sorted(set(wanted.decided) - met):
            raise BundleError(f"{path}: weight {lost[0]} was decided and no operator reads it", AGAIN)
        _check_coverage(file, wanted)
        for node, weight in file.weights():
            tags = file.tags(weight)
            joined = [(wanted.part(role, tags.get(LAYER, "")), rows) for role, rows in rows_of(tags)]
            if joined and all(isinstance(part, str) for part, _ in joined):
                reading.joined(node, weight, [(str(part), rows) for part, rows in joined])
        reading.by_name()


def check_proxies(matrices: Iterable[Matrix]) -> None:
    """A solver that looks at outputs must leave no matrix worse than the plain fit does.

    Raises:
        BundleError: one is; it is named.
    """
    for one in matrices:
        if one.proxy is not None and one.plain_proxy is not None and not one.proxy <= one.plain_proxy:
            what = f"loses {one.proxy:.4g} of its output's power with {one.solver} and {one.plain_proxy:.4g} with the plain fit"
            raise BundleError(f"weight {one.name} {what}", AGAIN)


def worst_relative(reference: np.ndarray, other: np.ndarray) -> float:
    """Largest difference of two arrays of logits relative to the largest logit; infinity where one holds NaN or infinity."""
    if not (np.isfinite(reference).all() and np.isfinite(other).all()):
        return float("inf")
    return float(np.abs(reference - other).max() / max(float(np.abs(reference).max()), 1e-30))


def check_equal(reference: np.ndarray, other: np.ndarray, what: str) -> None:
    """Refuse a fold, a rotation or another exact rewrite, `what`, whose logits are not the model's.

    Raises:
        BundleError: they differ by more than `LIMIT` of the largest one.
    """
    if (found := worst_relative(reference, other)) > LIMIT:
        raise BundleError(f"{what} changes logits by {found:.2g} of the largest, {LIMIT:g} is allowed", AGAIN)


def _parts(written: Written, wanted: Expected, path: Path) -> list[tuple[Decided, slice]]:
    """The decided weights that a written matrix is made of, with their rows."""
    name, undecided = _known(written.weight, wanted.decided), f"{path}: {written.node} reads the quantized {written.weight}"
    if name in wanted.decided:
        return [(wanted.decided[name], slice(0, wanted.decided[name].shape[0]))]
    found = []
    for role, rows in rows_of(written.tags):
        part = wanted.part(role, written.tags.get(LAYER, ""))
        if not isinstance(part, Decided):
            raise BundleError(f"{undecided}, for whose rows of {role} nothing was decided", AGAIN)
        found.append((part, rows))
    if not found:
        raise BundleError(f"{undecided}, for which nothing was decided", AGAIN)
    return found


def rows_of(tags: Mapping[str, str]) -> list[tuple[str, slice]]:
    """Roles of the parts of a joined matrix, with their rows."""
    said = [part.rsplit(":", 2) for part in filter(None, tags.get(PARTS, "").split(","))]
    return [(role, slice(int(first), int(last))) for role, first, last in said]


def _known(initializer: str, known: Collection[str]) -> str:
    """`base_name`, but a weight's own name may end as one that emission makes does."""
    name = initializer
    for ending in _ENDINGS:
        if name in known:
            break
        name = name.removesuffix(ending)
    return name


def base_name(initializer: str) -> str:
    """The weight's name without what emission and lowering put after it."""
    name = initializer
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def _compare_scales(written: Written, part: Decided, rows: slice, path: Path) -> None:
    groups = sizes(part.scales)
    if (rows.stop - rows.start, *written.scales.shape[1:]) != groups or (part.group and written.group != part.group):
        raise BundleError(
            f"{path}: weight {part.name} has scales of shape {list(written.scales[rows].shape)} in groups of {written.group}, "
            f"decided were {list(groups)} in groups of {part.group}",
            AGAIN,
        )
    zeros = np.zeros(groups, np.int16)
    if part.zero_points is not None:
        zeros = part.zero_points.numpy().astype(np.int16) - (1 << (part.bits - 1))
    told: list[tuple[str, np.ndarray, np.ndarray]] = [
        ("scales", written.scales[rows], part.scales.numpy().astype(np.float32)),
        ("zero points", written.zeros[rows], zeros),
    ]
    if (written.offsets is None) != (part.offsets is None):
        raise BundleError(f"{path}: weight {part.name} {'lost' if written.offsets is None else 'got'} offsets", AGAIN)
    if written.offsets is not None and part.offsets is not None:
        told.append(("offsets", written.offsets[rows], part.offsets.numpy().astype(np.float32)))
    for what, found, wanted in told:
        if not np.array_equal(found, wanted):
            raise _differs(path, part.name, what, found, wanted, (0, 0))


def _compare_integers(written: Written, parts: Sequence[tuple[Decided, slice]], path: Path) -> None:
    covered = dict.fromkeys((part.name for part, _ in parts), 0)
    for piece in written.pieces():
        for part, rows in parts:
            first, last = max(piece.rows.start, rows.start), min(piece.rows.stop, rows.stop)
            if first < last:
                found = Piece(slice(first - rows.start, last - rows.start), piece.columns, _some(piece, first, last))
                covered[part.name] += _compare_piece(found, part, path)
                _check_padding(found, part, path)
    for part, _ in parts:
        if covered[part.name] != part.shape[0] * part.shape[1]:
            raise BundleError(f"{path}: weight {part.name} has {covered[part.name]} weights, not {list(part.shape)}", AGAIN)


def _some(piece: Piece, first: int, last: int) -> np.ndarray:
    return piece.q[first - piece.rows.start : last - piece.rows.start]


def _compare_piece(piece: Piece, part: Decided, path: Path) -> int:
    """How many weights were compared."""
    wanted = part.q.numpy()[piece.rows, piece.columns]
    found = piece.q[:, : wanted.shape[1]]
    if not np.array_equal(found, wanted):
        raise _differs(path, part.name, "integers", found, wanted, (piece.rows.start, piece.columns.start))
    return wanted.size


def _check_padding(piece: Piece, part: Decided, path: Path) -> None:
    """What fills the last group after K is 0: without zero points it counts as nothing, whatever an input is padded with."""
    padding = piece.q[:, max(0, part.shape[1] - piece.columns.start) :]
    if padding.any():
        raise BundleError(f"{path}: weight {part.name}: the last group is filled up with weights that are not 0", AGAIN)


def _differs(path: Path, name: str, what: str, found: np.ndarray, wanted: np.ndarray, at: tuple[int, int]) -> BundleError:
    row, column = (int(index) for index in np.argwhere(found != wanted)[0])
    count = int((found != wanted).sum())
    return BundleError(
        f"{path}: weight {name}: {count} {what} are not those that were decided, the first at row {row + at[0]}, column "
        f"{column + at[1]}: {found[row, column]} instead of {wanted[row, column]}",
        AGAIN,
    )


def _check_coverage(file: GraphFile, wanted: Expected) -> None:
    """No operator multiplies by a matrix of the file for which nothing was decided."""
    known = {*wanted.decided, *wanted.floats}
    for node, weight in file.weights():
        tags = file.tags(weight)
        roles = [role for role, _ in rows_of(tags)]
        joined = bool(roles) and all(wanted.part(role, tags.get(LAYER, "")) is not None for role in roles)
        if _known(weight, known) not in known and not joined:
            what = f"{node.op_type} {node.name} multiplies by {weight}, for which nothing was decided"
            raise BundleError(f"{file.path}: {what}", AGAIN)
