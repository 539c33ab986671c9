"""Which files belong to a checkpoint, and getting them into a folder whole.

Knows: names of files, copying, hashing, joining parts. Does not know: where files come from.
"""

import fnmatch
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from appliance.errors import CheckpointError, StorageError

WEIGHTS = ("*.safetensors", "*.gguf")
GENERATION = "generation_config.json"
WANTED = (
    *WEIGHTS,
    "*.gguf.part[0-9]*",
    "*.safetensors.index.json",
    "config.json",
    GENERATION,
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "modules.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "*.spm",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "README.md",
)
"""What is taken, by the last part of the name. Everything else stays where it is."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.joblib")
"""Formats that run code when they are loaded: never taken, not even copied."""
PIECE = 4 << 20
_PART = re.compile(r"^(?P<whole>.+\.gguf)\.part(?P<number>\d+)$")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")


def is_wanted(name: str) -> bool:
    """Whether a file of a checkpoint by this path is taken."""
    return _fits(PurePosixPath(name).name, WANTED) and not is_pickle(name)


def is_weight(name: str) -> bool:
    """Whether it holds tensors, whole or in part."""
    last = PurePosixPath(name).name
    return _fits(last, WEIGHTS) or _PART.match(last) is not None


def is_pickle(name: str) -> bool:
    """Whether the name says that loading it would run code."""
    return _fits(PurePosixPath(name).name.lower(), PICKLES)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def choose(names: Sequence[str], include: Sequence[str], where: str) -> list[str]:
    """The files to take out of `names`.

    Raises:
        CheckpointError: nothing to take, only pickles, or several GGUF models without a choice among them.
    """
    taken = [name for name in names if is_wanted(name)]
    if include:
        taken = [name for name in taken if not is_weight(name) or _fits(name, include) or _fits(Path(name).name, include)]
    weights = [name for name in taken if is_weight(name)]
    if not weights:
        refused = next((name for name in names if is_pickle(name)), None)
        if refused:
            raise CheckpointError(
                f"{where}: {refused} is a pickle, and loading one can run any code", "get the model as .safetensors or .gguf"
            )
        wish = f" that fits {' or '.join(include)}" if include else ""
        raise CheckpointError(f"{where}: no .safetensors and no .gguf file{wish}", "name a folder or file that holds a model")
    # mmproj files are the image half of a model that has another file for the rest.
    language = [name for name in weights if ".gguf" in name and "mmproj" not in name.lower()]
    models = sorted({_SHARD.sub("", _PART.sub(r"\g<whole>", name)) for name in language})
    if len(models) > 1:
        shown = ", ".join(models[:8]) + (", ..." if len(models) > 8 else "")
        raise CheckpointError(f"{where}: {len(models)} GGUF models: {shown}", f"choose one: --include '{models[0]}'")
    return taken


def safe_name(name: str, where: str) -> PurePosixPath:
    """`name` as a path below a folder; `CheckpointError` when it would leave the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name or ":" in path.parts[0]:
        raise CheckpointError(f"{where}: unsafe file name {name!r}", "do not use this model")
    return path


def below_common_folder(names: Sequence[str]) -> dict[str, str]:
    """Each name without the folders that all of them share."""
    parents = [PurePosixPath(name).parts[:-1] for name in names]
    shared = 0
    while parents and all(len(parent) > shared and parent[shared] == parents[0][shared] for parent in parents):
        shared += 1
    return {name: "/".join(PurePosixPath(name).parts[shared:]) for name in names}


def require_space(folder: Path, wanted: int) -> None:
    """`StorageError` when the disk under `folder` cannot take `wanted` more bytes."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise StorageError(f"{folder}: {free / 1e9:.1f} GB free, {wanted / 1e9:.1f} GB needed", "free some space")


def copy(source: BinaryIO, target: Path, advance: Callable[[int], None]) -> str:
    """Write all of `source` to `target`; returns its sha256. A beginning that is already there is compared, not written."""
    digest = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "r+b" if target.exists() else "w+b") as file:
        while piece := source.read(PIECE):
            place = file.tell()
            if file.read(len(piece)) != piece:
                file.seek(place)
                file.truncate()
                file.write(piece)
            digest.update(piece)
            advance(len(piece))
        file.truncate()
    return digest.hexdigest()


def join_parts(folder: Path) -> None:
    """Put `x.gguf.part00`, `x.gguf.part01`, ... together into `x.gguf`, part by part, so that disk use stays near 1x.

    Raises:
        CheckpointError: a part is missing.
    """
    groups: dict[Path, dict[int, Path]] = {}
    for path in folder.rglob("*.gguf.part*"):
        if found := _PART.match(path.name):
            groups.setdefault(path.with_name(found["whole"]), {})[int(found["number"])] = path
    for whole, parts in groups.items():
        first = min(parts)
        for number in range(first, first + len(parts)):
            if number not in parts or first > 1:
                raise CheckpointError(f"{whole.name}: part {number if first <= 1 else 0} is missing", "name every part's package")
        joining = whole.with_name(f"{whole.name}.joining")
        with open(joining, "wb") as file:
            for number in sorted(parts):
                with open(parts[number], "rb") as part:
                    shutil.copyfileobj(part, file, PIECE)
                parts[number].unlink()
        joining.rename(whole)
