"""The pool: model ids -> loaded engines.

Knows: names, aliases, the default, which model is loaded, loading or failed. Does not know: HTTP, or what an engine does.
Every method may be called from any thread.
"""

import difflib
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from appliance.bundle.store import Bundle, open_bundle
from appliance.engine.catalog import Catalog, read_catalog
from appliance.engine.protocol import Engine
from appliance.errors import ApplianceError, BundleError, ModelNotFound, Unavailable

Open = Callable[[Bundle], Engine]
Condition = Literal["unloaded", "loading", "loaded", "failed"]


@dataclass(frozen=True)
class LoadedModel:
    """A model that can answer now."""

    id: str
    bundle: Bundle
    fingerprint: str  # of exactly these weights: 12 hex digits of the bundle's hash
    engine: Engine


@dataclass(frozen=True)
class Status:
    """What is known of one model now."""

    condition: Condition
    model: LoadedModel | None = None
    failure: str | None = None


@dataclass
class _Place:
    """One model's engine, or the lack of it. `lock` is held while it is loaded or unloaded."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    status: Status = Status("unloaded")


def open_onnx(target: str, threads: int, targets: Path | None = None) -> Open:
    """Engines on onnxruntime.

    Args:
        target: whose graphs of a bundle to run.
        threads: of one step; 0 = one for each physical core.
        targets: folder with vendors' own target files.
    """

    def open_engine(bundle: Bundle) -> Engine:
        # Pulls in onnxruntime, numpy and the tokenizer: half a second that only a process that runs models should pay.
        if bundle.manifest.task == "embed":
            from appliance.engine.embedder import Embedder

            # There are no static embedding graphs, so where text is generated on an NPU this runs on what it was built for.
            variants = bundle.manifest.variants
            return Embedder(bundle, target=target if target in variants else min(variants), threads=threads, targets=targets)
        from appliance.engine.onnx import OnnxEngine

        return OnnxEngine(bundle, target=target, threads=threads, targets=targets)

    return open_engine


class ModelPool:
    """Installed models, each loaded at most once, on its first use.

    Args:
        folder: where bundles are installed; read again whenever a name is looked up, so a new bundle needs no restart.
        open_engine: makes an engine, not yet loaded, of a bundle.
        default: id or alias meant when none is named; empty = the first by name that generates text.
        aliases: other names -> ids.
    """

    def __init__(self, folder: Path, open_engine: Open, *, default: str = "", aliases: Mapping[str, str] | None = None):
        self._folder = folder
        self._open = open_engine
        self._default = default
        self._aliases = dict(aliases or {})
        self._places: dict[str, _Place] = {}
        self._lock = threading.Lock()
        self._closed = False

    def catalog(self) -> Catalog:
        """What is installed now."""
        return read_catalog(self._folder)

    def find(self, name: str = "") -> Bundle:
        """The bundle meant by an id, an alias or, when empty, the default.

        Raises:
            BundleError: what lies in the folder of that name is damaged; says what.
            ModelNotFound: there is none; names the installed ones.
        """
        catalog = self.catalog()
        bundles = catalog.bundles
        answering = (one for one, bundle in bundles.items() if bundle.manifest.task == "generate")
        wanted = name or self._default or next(answering, "") or next(iter(bundles), "")
        wanted = self._aliases.get(wanted, wanted)
        if wanted in bundles:
            return bundles[wanted]
        damaged = [one for one in catalog.problems if re.match(re.escape(str(self._folder / wanted)) + r"[/: ]", one)]
        if damaged:
            raise BundleError(damaged[0], param="model")
        if not bundles:
            fix = "get one: appliance pull smollm2-135m, then appliance build smollm2-135m"
            raise ModelNotFound(f"no model is installed in {self._folder}", fix, param="model")
        known = [*bundles, *self._aliases]
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f'did you mean "{near[0]}"? ' if near else ""
        raise ModelNotFound(f'there is no model "{wanted}" here', f"{hint}installed: {', '.join(bundles)}", param="model")

    def model(self, name: str = "") -> LoadedModel:
        """The model meant by `name`, ready to answer; loads it first if need be, and waits if another thread is at it.

        Raises:
            ModelNotFound: there is no such model.
            BundleError, DeviceError: it cannot be loaded. The next call tries again.
            Unavailable: the pool is closed.
        """
        loaded = self.status(self._aliases.get(name, name)).model
        if loaded is not None:  # the usual case reads no file
            return loaded
        bundle = self.find(name)
        place = self._place(bundle.manifest.name)
        with place.lock:
            if self._closed:
                raise Unavailable("the appliance is stopping", "try again when it is back")
            return place.status.model or self._load(place, bundle)

    def embedder(self) -> Bundle | None:
        """The installed embedding model, the first by name; None when there is none."""
        bundles = self.catalog().bundles.values()
        return next((bundle for bundle in bundles if bundle.manifest.task == "embed"), None)

    def status(self, model: str) -> Status:
        """Whether the model of that id is loaded; never waits."""
        with self._lock:
            place = self._places.get(model)
        return place.status if place else Status("unloaded")

    def loaded(self) -> tuple[LoadedModel, ...]:
        """The models that can answer now; never waits."""
        with self._lock:
            places = list(self._places.values())
        return tuple(model for place in places if (model := place.status.model) is not None)

    def close(self) -> None:
        """Unload everything and refuse from now on. An engine that is being loaded is waited for."""
        with self._lock:
            self._closed = True
            places = list(self._places.values())
        for place in places:
            with place.lock:
                loaded, place.status = place.status.model, Status("unloaded")
            if loaded is not None:
                loaded.engine.unload()

    def _place(self, model: str) -> _Place:
        with self._lock:
            return self._places.setdefault(model, _Place())

    def _load(self, place: _Place, bundle: Bundle) -> LoadedModel:
        place.status = Status("loading")
        try:
            bundle = open_bundle(bundle.path)  # with every hash: a damaged weight must not answer
            engine = self._open(bundle)
            engine.load()
        except BaseException as failure:
            what = str(failure) if isinstance(failure, ApplianceError) else f"internal error ({type(failure).__name__})"
            place.status = Status("failed", failure=what)
            raise
        model = LoadedModel(bundle.manifest.name, bundle, bundle.hash[:12], engine)
        place.status = Status("loaded", model)
        return model
