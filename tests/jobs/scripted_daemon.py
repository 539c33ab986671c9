"""`python -m tests.jobs.scripted_daemon RULES ARGUMENTS...`: `appliance ARGUMENTS` over an engine that answers by rules.

RULES is a JSON file: a list of {"when": text, "say": answer, "write": [path, text], "delay": seconds}; the first rule
whose text stands in the last message answers. "write" changes a file just before. The file is read at every request.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from appliance import cli
from appliance.engine import pool
from appliance.engine.protocol import ChatPrompt, GenerateRequest
from tests.api.fake_engine import FakeEngine, FakeStream


class ScriptedEngine(FakeEngine):
    """Answers by rules."""

    def __init__(self, path: Path):
        super().__init__(context=100_000)
        self._path = path

    def stream(self, request: GenerateRequest) -> FakeStream:
        assert isinstance(request.prompt, ChatPrompt)
        asked = str(request.prompt.messages[-1]["content"])
        rules: list[dict[str, Any]] = json.loads(self._path.read_text(encoding="utf-8"))
        rule = next(rule for rule in rules if rule["when"] in asked)
        if "write" in rule:
            Path(rule["write"][0]).write_text(rule["write"][1], encoding="utf-8")
        time.sleep(rule.get("delay", 0.0))
        words = rule["say"].split(" ")
        self.pieces = [words[0], *(f" {word}" for word in words[1:])]
        return super().stream(request)


def main() -> int:
    """Put the engine where the real one would be opened, then run the real command line."""
    engine = ScriptedEngine(Path(sys.argv[1]))
    pool.open_onnx = lambda target, threads, targets: lambda bundle: engine
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
