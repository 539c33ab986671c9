"""The daemon as its own commands reach it.

Knows: where a daemon of these settings may listen, and how its refusals become errors of this process.
Does not know: routes.
"""

import contextlib
from pathlib import Path
from typing import Any

import httpx

from appliance.config import Config
from appliance.errors import ApplianceError, BadInput, Unavailable

PROBE_SECONDS = 2.0


class Client:
    """Asks a running daemon for JSON.

    Args:
        http: a connection to it.
    """

    def __init__(self, http: httpx.Client):
        self._http = http

    def get(self, path: str, query: dict[str, Any] | None = None) -> Any:
        """What a route answers; its refusal is raised as an `ApplianceError` with the same exit code."""
        return self._ask("GET", path, params=query or {})

    def post(self, path: str, body: Any) -> Any:
        """The same for a body."""
        return self._ask("POST", path, json=body)

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def _ask(self, method: str, path: str, params: dict[str, Any] | None = None, json: Any = None) -> Any:
        try:
            response = self._http.request(method, path, params=params, json=json)
        except httpx.TransportError as failure:
            reason = str(failure) or type(failure).__name__
            raise Unavailable(f"the daemon went away: {reason}", "look at its log and start it again: appliance serve") from None
        if response.status_code >= 400:
            raise refusal(response)
        return response.json()


def find_client(config: Config) -> Client:
    """The daemon of these settings; `Unavailable` when none answers."""
    http = find_daemon(config)
    if http is None:
        raise Unavailable("no daemon answers", "start it: appliance serve")
    return Client(http)


def find_daemon(config: Config) -> httpx.Client | None:
    """A connection to the daemon of these settings, if it answers: over its socket, else over TCP."""
    if config.server.socket and config.socket_path.is_socket():
        client = _client("http://appliance", config.socket_path)
        if _answers(client):
            return client
    for address in config.server.addresses:
        client = _client(f"http://{address}")
        if _answers(client):
            return client
    return None


def refusal(response: httpx.Response) -> ApplianceError:
    """The daemon's error as one of ours, so that it ends in the same line and exit code as in-process."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the daemon answered with HTTP {response.status_code}"
    if response.status_code == 503:
        return Unavailable(message)
    return BadInput(message) if response.status_code < 500 else ApplianceError(message)


def _client(url: str, socket_path: Path | None = None) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(socket_path)) if socket_path else httpx.HTTPTransport()
    # A long prompt may take minutes before its first token; only the connection itself has a limit. Proxies of the
    # environment are for the network, not for this machine.
    return httpx.Client(base_url=url, transport=transport, timeout=httpx.Timeout(None, connect=PROBE_SECONDS), trust_env=False)


def _answers(client: httpx.Client) -> bool:
    """Whether an appliance answers there; a client that is of no use is closed."""
    with contextlib.suppress(httpx.TransportError, ValueError):
        if client.get("/healthz", timeout=PROBE_SECONDS).json() == {"status": "ok"}:
            return True
    client.close()
    return False
