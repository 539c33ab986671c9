"""A model on Hugging Face, through its own client (which honours the person's token and mirror settings).

Knows: what the hub says of a model: files, hashes, licence. Does not know: how bytes travel; the client does.
Source: huggingface_hub, `HfApi.model_info(files_metadata=True)` and `snapshot_download`.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError, CheckpointError, NotFound, Unavailable
from appliance.pull.files import choose, safe_name
from appliance.pull.license import UNKNOWN
from appliance.pull.offer import Offer, Wishes
from appliance.pull.reference import parse_reference

ORDER = 40
FORM = "hf:OWNER/NAME[@REVISION] (Hugging Face; OWNER/NAME alone means this)"
PREFIXES = ("hf:", "huggingface:")


def matches(text: str) -> bool:
    if text.startswith(PREFIXES):
        return True
    return text.count("/") == 1 and ":" not in text and not text.startswith((".", "~", "/")) and not text.endswith("/")


def look(text: str, wishes: Wishes) -> Offer:
    from huggingface_hub import HfApi

    model, revision = parse_reference(text, FORM)
    with _explained(model):
        info = HfApi(endpoint=wishes.endpoint).model_info(model, revision=revision, files_metadata=True, timeout=30)
    files = {sibling.rfilename: sibling for sibling in info.siblings or []}
    taken = choose(sorted(files), wishes.include, f"hf:{model}")
    stated = next((tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")), None)
    license = stated or str(getattr(info.card_data, "license", None) or UNKNOWN)
    size = sum(files[name].size or 0 for name in taken)

    def fetch(folder: Path, work: Path) -> None:
        from huggingface_hub import snapshot_download

        with _explained(model):
            # Exact names, with what a pattern would read into them taken away: nothing else can slip in.
            snapshot_download(
                model,
                revision=info.sha,
                local_dir=work / "hub",
                allow_patterns=[_literal(name) for name in taken],
                endpoint=wishes.endpoint,
            )
        for name in taken:
            here = work / "hub" / safe_name(name, f"hf:{model}")
            _verify(here, files[name])
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(here, target)

    return Offer(
        name=model.split("/")[1],
        origin=f"hf:{model}@{info.sha}",
        license=license,
        license_at=f"the model card of {model}",
        size=size,
        fetch=fetch,
    )


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _verify(path: Path, promised: Any) -> None:
    """Check sha256 where the hub keeps one (large files), else git's own hash of the content."""
    if not path.is_file():
        raise Unavailable(f"{path.name} did not arrive", "try again; it goes on where it stopped")
    with open(path, "rb") as file:
        if promised.lfs is not None:
            found, wanted = hashlib.file_digest(file, "sha256").hexdigest(), promised.lfs.sha256
        else:
            content = file.read()
            found, wanted = hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest(), promised.blob_id
    if found != wanted:
        raise CheckpointError(
            f"{path.name} has hash {found}, the hub promised {wanted}", "try again; if it stays so, do not use it"
        )


@contextmanager
def _explained(model: str) -> Iterator[None]:
    """Turn whatever the client raises into one of our errors."""
    from huggingface_hub import errors

    try:
        yield
    except ApplianceError:
        raise
    except errors.GatedRepoError:
        fix = "accept its licence on the model's page, then: hf auth login"
        raise NotFound(f"hf:{model} is given only to those who accepted its licence", fix) from None
    except errors.RevisionNotFoundError:
        raise NotFound(f"hf:{model} has no such revision", "check what stands after the @") from None
    except errors.RepositoryNotFoundError:
        raise NotFound(f"hf:{model} does not exist or is private", "check the name, or: hf auth login") from None
    except Exception as failure:
        # The client's transport errors come from a library of its own choice, so they cannot be named here.
        # A full disk is not the hub's fault; the command line has its own words for it.
        if isinstance(failure, OSError) and failure.errno is not None and failure.filename is not None:
            raise
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        fix = "check the network, or --endpoint URL for a mirror; a second try goes on where it stopped"
        raise Unavailable(f"Hugging Face cannot be reached for {model}: {reason}", fix) from failure
