"""Nothing of ours, or of a library under us, gathers data on how it is used."""

import os
import subprocess
import sys
from pathlib import Path


def test_onnxruntime_gathers_nothing(home: Path, tmp_path: Path) -> None:
    """Loading it is enough to make it write a device id and a database of events to send; `doctor` loads it."""
    person = tmp_path / "person"
    person.mkdir()
    # Nothing else of ours comes along: onnxruntime also keeps quiet where a variable tells of a continuous integration.
    ours = {name: value for name, value in os.environ.items() if name.startswith("APPLIANCE_")}
    environment = {**ours, "PATH": os.environ["PATH"], "HOME": str(person)}

    def run(*code: str) -> set[str]:
        subprocess.run([sys.executable, *code], env=environment, stdout=subprocess.DEVNULL, check=True)
        return {path.name for path in person.rglob("*") if path.is_file()}

    assert run("-m", "appliance", "doctor") == set()
    assert run("-c", "import onnxruntime") != set(), "onnxruntime no longer does: this test has nothing to look at"
