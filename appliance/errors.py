"""The one tree of errors a person may see.

Knows: what an error says, the exit code of the command line and the HTTP status it maps to.
Does not know: how it is shown (`appliance.cli` prints it, `appliance.api.errors` turns it into JSON).

Every message says what happened and, after a semicolon, what to do next.
"""


class ApplianceError(Exception):
    """Something went wrong that a person can act on.

    Attributes:
        exit_code: process exit code of the command line.
        status: HTTP status.
        kind: OpenAI's error `type`.
        code: OpenAI's error `code`, a stable word for programs.
        param: name of the offending request field, if there is one.
    """

    exit_code = 1
    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, what: str, fix: str = "", *, param: str | None = None):
        super().__init__(f"{what}; {fix}" if fix else what)
        self.what = what
        self.fix = fix
        self.param = param


class BadInput(ApplianceError):
    """The caller handed over something that cannot be used."""

    exit_code = 2
    status = 400
    kind = "invalid_request_error"


class CheckpointError(BadInput):
    """A checkpoint is missing, damaged, of an unknown format or architecture, or unsafe to read."""

    code = "bad_checkpoint"


class BundleError(BadInput):
    """A bundle is damaged, of another format version, or not what its manifest says."""

    code = "bad_bundle"


class TargetError(BadInput):
    """A target or a scheme is unknown, or cannot do what is asked of it."""

    code = "bad_target"


class ConfigError(BadInput):
    """A file of settings has an unknown key or a value out of range."""

    code = "bad_config"


class RequestError(BadInput):
    """A request names a field or a value that the appliance does not take."""

    code = "invalid_value"


class UnsupportedField(RequestError):
    """A request asks for something that exists elsewhere but not here; ignoring it would give a wrong answer."""

    code = "unsupported_parameter"


class TooLarge(BadInput):
    """A request's body is over the limit."""

    status = 413
    code = "request_too_large"


class ContextLengthError(BadInput):
    """The prompt, with the tokens asked for, does not fit the context."""

    code = "context_length_exceeded"


class NotFound(ApplianceError):
    """A thing was named that does not exist."""

    exit_code = 2
    status = 404
    kind = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    """A model was named that is not installed."""

    code = "model_not_found"


class LossError(ApplianceError):
    """What was built lost more than its scheme may: it is taken for broken."""

    exit_code = 4
    status = 422
    code = "loss"


class Unavailable(ApplianceError):
    """The appliance cannot do it now, but may later: loading, out of slots, device lost."""

    exit_code = 3
    status = 503
    code = "unavailable"


class StorageError(ApplianceError):
    """The disk is full, or a file cannot be written."""

    exit_code = 2
    status = 507
    code = "storage"


class DeviceError(ApplianceError):
    """An execution provider refused, failed, or would have fallen back in silence."""

    exit_code = 5
    status = 503
    code = "device"


class Interrupted(ApplianceError):
    """The person or the system asked to stop; nothing half-done was left behind."""

    exit_code = 130
    status = 499
    code = "interrupted"
