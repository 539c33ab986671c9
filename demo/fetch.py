"""Gets the starter model for the tests, if it is not there: python -m demo.fetch"""

import subprocess
import sys

from demo.place import STARTER, environment, starter_candidates, write_config


def main() -> int:
    """The exit code of the pull; 0 when there is nothing to do."""
    if any(path.is_file() for path in starter_candidates()):
        return 0
    call = [sys.executable, "-m", "appliance.cli", "pull", STARTER, "--yes"]
    return subprocess.run(call, env=environment(write_config())).returncode


if __name__ == "__main__":
    sys.exit(main())
