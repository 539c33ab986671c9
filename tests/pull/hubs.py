"""Two hubs on this machine, as far as a client needs them: Hugging Face's and ModelScope's paths over one set of files.

Knows: the paths and fields of both. Does not know: the code under test.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class Hub:
    """What the hub holds, and how it misbehaves."""

    files: dict[str, bytes]
    license: str = "apache-2.0"
    model: str = "owner/small"
    promised: dict[str, bytes] = field(default_factory=dict)  # content that the hashes are of, where it is not the real one
    break_after: int = 0  # bytes of a large file after which the connection breaks, once a file
    ranges: bool = True
    status: int = 0  # answer everything with this
    asked: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    base: str = ""

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.promised.get(name, self.files[name])).hexdigest()

    def blob(self, name: str) -> str:
        content = self.promised.get(name, self.files[name])
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub on a free port of 127.0.0.1; its address is `hub.base`."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.base = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        hub.asked.append(self.path)
        if hub.status:
            self._json({"error": "no"}, hub.status)
        elif path.startswith("/api/v1/models/"):
            self._modelscope(path.removeprefix("/api/v1/models/"), query)
        elif path.startswith("/api/models/"):
            self._hugging_face(path.removeprefix("/api/models/"))
        elif path.startswith(f"/{hub.model}/resolve/{COMMIT}/"):
            self._file(path.removeprefix(f"/{hub.model}/resolve/{COMMIT}/"))
        else:
            self._json({"error": "not found"}, 404)

    def _modelscope(self, rest: str, query: dict[str, list[str]]) -> None:
        hub = self.hub
        if rest == hub.model:
            self._json({"Code": 200, "Data": {"License": hub.license, "Name": "small"}})
        elif rest == f"{hub.model}/repo/files":
            entries = [
                {"Path": name, "Type": "blob", "Size": len(content), "Sha256": hub.sha256(name), "Revision": COMMIT}
                for name, content in hub.files.items()
            ]
            self._json({"Code": 200, "Data": {"Files": [*entries, {"Path": "sub", "Type": "tree", "Size": 0}]}})
        elif rest == f"{hub.model}/repo" and query.get("Revision") == [COMMIT]:
            self._file(query["FilePath"][0])
        else:
            self._json({"Code": 404, "Message": "not found"}, 404)

    def _hugging_face(self, rest: str) -> None:
        hub = self.hub
        if rest in (hub.model, f"{hub.model}/revision/main", f"{hub.model}/revision/{COMMIT}"):
            siblings = [
                {"rfilename": name, "size": len(content), "blobId": hub.blob(name)} | self._lfs(name)
                for name, content in hub.files.items()
            ]
            info = {"id": hub.model, "sha": COMMIT, "siblings": siblings, "tags": [f"license:{hub.license}"], "private": False}
            self._json(info)
        elif rest == f"{hub.model}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hub.blob(name)} | self._lfs(name)
                for name, content in hub.files.items()
            ]
            self._json(entries)
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _lfs(self, name: str) -> dict[str, object]:
        if not name.endswith(LARGE):
            return {}
        digest, size = self.hub.sha256(name), len(self.hub.files[name])
        return {"lfs": {"sha256": digest, "oid": digest, "size": size, "pointerSize": 134}}

    def _json(self, body: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self._send(status, content, {"Content-Type": "application/json"} | (headers or {}))

    def _file(self, name: str) -> None:
        hub = self.hub
        if name not in hub.files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content = hub.files[name]
        etag = hub.sha256(name) if name.endswith(LARGE) else hub.blob(name)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start, status = 0, 200
        wanted = self.headers.get("Range")
        if wanted and hub.ranges:
            start, status = int(wanted.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(
            status,
            content[start:],
            headers,
            cut=(name.endswith(LARGE) and name not in hub.broken and hub.break_after) or 0,
            name=name,
        )

    def _send(self, status: int, content: bytes, headers: dict[str, str], cut: int = 0, name: str = "") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            self.hub.broken.add(name)
            self.close_connection = True
            content = content[:cut]
        self.wfile.write(content)
