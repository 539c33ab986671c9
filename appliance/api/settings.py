"""What the HTTP layer can be told, apart from the models it serves.

Knows: its own limits. Does not know: `appliance.toml`; the daemon fills this in from it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ApiSettings:
    """Settings of one HTTP application.

    Attributes:
        max_body: bytes of the largest request body.
        preloaded: the default model is being loaded since the start, so readiness waits for it.
        job_key: made at the daemon's start; a request that brings it may say it is a job's, which waits for people's. "" = none.
    """

    max_body: int = 32 * 2**20
    preloaded: bool = True
    job_key: str = ""
