"""A model on a USB stick or another disk that was plugged in.

Knows: where removable disks are mounted. Does not know: how files are copied (`local`).
"""

import re
from pathlib import Path

from appliance.errors import NotFound
from appliance.pull.files import is_weight
from appliance.pull.offer import Offer, Wishes
from appliance.pull.sources import local

ORDER = 10
FORM = "usb:MODEL (a file or folder on a USB stick; usb: alone when there is only one)"
MOUNTS = Path("/proc/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")
PLACES = ("/media/", "/run/media/", "/mnt/", "/Volumes/")


def matches(text: str) -> bool:
    return text.startswith("usb:")


def look(text: str, wishes: Wishes) -> Offer:
    wanted = text.removeprefix("usb:").strip("/")
    sticks = mounted()
    if not sticks:
        raise NotFound("no USB stick is mounted", f"plug it in and mount it below {' or '.join(PLACES[:3])}")
    models = sorted({model for stick in sticks for model in models_on(stick)})
    fitting = [model for model in models if not wanted or model.name == wanted or str(model).endswith(f"/{wanted}")]
    names = ", ".join(model.name for model in models) or "none"
    where = " and ".join(str(stick) for stick in sticks)
    if not fitting:
        raise NotFound(f"no model {wanted!r} on {where}" if wanted else f"no model on {where}", f"models there: {names}")
    if len(fitting) > 1:
        raise NotFound(f"{len(fitting)} models on {where}: {names}", f"name one: usb:{fitting[0].name}")
    return local.look(str(fitting[0]), wishes)


def mounted() -> list[Path]:
    """Folders where a disk that can be taken away is mounted."""
    if not MOUNTS.is_file():
        return [path for path in Path(PLACES[-1]).glob("*") if path.is_mount()]
    # /proc/mounts writes a space as \040; fields: device, folder, type, options.
    lines = [line.split(" ") for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    points = [_OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[1]) for fields in lines if fields[0].startswith("/dev/")]
    return sorted(Path(point) for point in points if point.startswith(PLACES) and Path(point).is_dir())


def models_on(stick: Path) -> list[Path]:
    """GGUF files and folders with safetensors, at most three folders deep."""
    files = [path for depth in ("*", "*/*", "*/*/*") for path in stick.glob(depth) if path.is_file() and is_weight(path.name)]
    return sorted({path if path.suffix == ".gguf" else path.parent for path in files})
