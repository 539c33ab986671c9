"""Gets models for the tests, those that are not there: python -m demo.fetch [MODEL]... (without one: the starter model)"""

import subprocess
import sys

from demo.place import STARTER, candidates, environment, write_config


def main(models: list[str]) -> int:
    """The exit code of the first pull that fails; 0 when there is nothing to do."""
    for model in models:
        if any(path.is_file() for path in candidates(model)):
            continue
        call = [sys.executable, "-m", "appliance", "pull", model, "--yes"]
        code = subprocess.run(call, env=environment(write_config())).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [STARTER]))
