"""`python -m tests.api.fake_daemon REPEATS DELAY ARGUMENTS...`: `appliance ARGUMENTS` over a fake engine, as a process.

The engine says its answer REPEATS times, with DELAY seconds before each piece.
"""

import sys

from appliance import cli
from appliance.engine import pool
from tests.api.fake_engine import FakeEngine


def main() -> int:
    """Put the fake engine where the real one would be opened, then run the real command line."""
    engine = FakeEngine(pieces=["The capital", " of France", " is Paris", "."] * int(sys.argv[1]), delay=float(sys.argv[2]))
    pool.open_onnx = lambda target, threads, targets: lambda bundle: engine
    return cli.main(sys.argv[3:])


if __name__ == "__main__":
    sys.exit(main())
