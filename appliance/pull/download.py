"""One file over HTTP, resumable and checked.

Knows: range requests, sizes, sha256. Does not know: any hub's paths.
Source: RFC 9110, section 14 (range requests).
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx

from appliance.errors import CheckpointError, NotFound, Unavailable

TRIES = 5
OK, PARTIAL, OUT_OF_RANGE = 200, 206, 416


def client() -> httpx.Client:
    """A client that follows redirects (hubs answer with the address of their store) and gives up on silence."""
    return httpx.Client(follow_redirects=True, timeout=httpx.Timeout(30, connect=15))


def download(
    http: httpx.Client, url: str, target: Path, *, size: int | None, sha256: str | None, advance: Callable[[int], None]
) -> None:
    """Get `url` into `target`; what is there already is kept and the rest asked for.

    Raises:
        Unavailable: the server cannot be reached, or breaks off `TRIES` times without sending anything new.
        NotFound: the server has no such file. CheckpointError: the file has another size or hash than promised.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        if size is not None and target.stat().st_size > size:
            target.unlink()
        else:
            advance(target.stat().st_size)
    failures = 0
    while size is None or _size(target) < size:
        before = _size(target)
        try:
            _continue(http, url, target, advance)
            if size is None or _size(target) == before:
                break
        except httpx.TransportError as failure:
            failures = failures + 1 if _size(target) == before else 0
            if failures >= TRIES:
                raise Unavailable(
                    f"{httpx.URL(url).host} does not answer: {failure}", "check the network; a second try goes on"
                ) from None
    _check(target, url, size, sha256)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _continue(http: httpx.Client, url: str, target: Path, advance: Callable[[int], None]) -> None:
    have = _size(target)
    # Without compression: a range counts bytes of the file, not of its compressed form.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with http.stream("GET", url, headers=headers) as answer:
        if answer.status_code == OUT_OF_RANGE:
            return
        raise_for_status(answer)
        resumed = answer.status_code == PARTIAL and answer.headers.get("content-range", "").startswith(f"bytes {have}-")
        if have and not resumed:
            advance(-have)
        with open(target, "ab" if resumed else "wb") as file:
            for piece in answer.iter_bytes():  # as it comes: a larger piece would be lost whole in a break
                file.write(piece)
                advance(len(piece))


def raise_for_status(answer: httpx.Response) -> None:
    """Turn an HTTP refusal into one of our errors."""
    if answer.is_success:
        return
    where = f"{answer.url.host} answers {answer.status_code} for {answer.url.path}"
    if answer.status_code in (401, 403):
        raise NotFound(where, "the model is private or its licence must be accepted on the hub's page first")
    if answer.status_code == 404:
        raise NotFound(where, "check the name and the revision")
    raise Unavailable(where, "try again later")


def _check(target: Path, url: str, size: int | None, sha256: str | None) -> None:
    name = target.name
    if size is not None and _size(target) != size:
        found = _size(target)
        target.unlink(missing_ok=True)
        raise CheckpointError(f"{name}: {found} bytes came, {size} were promised", "try again")
    if sha256 is None:
        return
    with open(target, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256.lower():
        target.unlink()
        raise CheckpointError(
            f"{name} from {httpx.URL(url).host} has sha256 {digest}, {sha256} was promised", "do not use this source"
        )
