"""Every setting: its default, its environment variable and what is allowed."""

from __future__ import annotations

import logging
import math
import numbers
import os
from dataclasses import dataclass, field
from typing import Any, Mapping

from .environment import HOW_TO_START, check_role
from .errors import ConfigError, NotSupportedYet

DEFAULT_WARMUP_STEPS = 200
RULES_WITHOUT_PARAMETERS = ("auto", "mirror", "replica", "none")
LEAST_BIGARRAY_BOUND = 32

_CLUSTER = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
_CLUSTER += ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_BOUND = "MXNET_KVSTORE_BIGARRAY_BOUND"
_NOT_YET = ("ODSGD_TIMEOUT_S", "ODSGD_STALL_S")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Config:
    """The settings of one store, checked at construction.

    Parameters
    ----------
    local_optimizer : str
        Local update rule: 'auto' (default), 'mirror', 'replica', 'none', 'dcsgd', or
        the name of any registered MXNet optimizer.
    local_optimizer_params : mapping
        Parameters of 'dcsgd' or of an optimizer by name; no other rule takes any.
    warmup_steps : int
        Updates of each key that are synchronous, >= 0. Default 200.
    delay : int
        0 (synchronous) or 1 (default).
    compression_params : mapping, optional
        {'type': 'fp16'}, or {'type': '2bit', 'threshold': t > 0 (default 0.5),
        'full_every': k >= 1 (optional)}; None or empty: none.
    """

    local_optimizer: str = "auto"
    local_optimizer_params: Mapping[str, Any] = field(default_factory=dict)
    warmup_steps: int = DEFAULT_WARMUP_STEPS
    delay: int = 1
    compression_params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_rule(self.local_optimizer, self.local_optimizer_params)
        _check_count("warmup_steps", self.warmup_steps)
        if type(self.delay) is not int or self.delay not in (0, 1):
            raise ConfigError(
                f"delay is {self.delay!r}; allowed are 0 (synchronous, the same as "
                "dist_sync) and 1 (One-step Delay SGD)."
            )
        if self.compression_params is not None:
            _check_compression(self.compression_params)
        if self.compression == "fp16" and self.local_optimizer.lower() == "mirror":
            raise ConfigError(
                "local_optimizer 'mirror' was given with compression 'fp16': mirror "
                "needs W(t) - W(t-1), which float16 does not hold. Use 'auto' or "
                "'replica', or leave the compression out."
            )

    @property
    def compression(self) -> str:
        """'fp16', '2bit', or '' for none."""
        return (self.compression_params or {}).get("type", "")

    @property
    def threshold(self) -> float:
        """Of '2bit': what a number that is sent stands for."""
        return float((self.compression_params or {}).get("threshold", 0.5))

    @property
    def full_every(self) -> int:
        """Of '2bit': of so many pushes one is whole; 0 for none."""
        return int((self.compression_params or {}).get("full_every", 0))

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None, **given: Any
    ) -> Config:
        """Settings from keyword arguments, else ODSGD_* variables, else defaults.

        Parameters
        ----------
        environ : mapping, optional
            The variables; `os.environ` when left out.
        **given
            Fields of `Config`. None means not given.

        Raises
        ------
        ConfigError
            A value is not allowed; the message names the variable it came from.
        """
        environ = os.environ if environ is None else environ
        for variable in _NOT_YET:
            if environ.get(variable):
                given = f"{variable} is set to {environ[variable]!r}"
                raise NotSupportedYet(f"{given}, and is not supported yet. Unset it.")
        values: dict[str, Any] = {}
        for name, variable, parse in _VARIABLES:
            if environ.get(variable):
                values[name] = parse(variable, environ[variable])
        explicit = {k: v for k, v in given.items() if v is not None}
        rule = explicit.get("local_optimizer")
        if isinstance(rule, str) and rule.lower() in RULES_WITHOUT_PARAMETERS:
            values.pop("local_optimizer_params", None)  # ODSGD_LOCAL_LR: another rule's
        read = values.keys() - explicit.keys()
        taken = [variable for name, variable, _ in _VARIABLES if name in read]
        try:
            return cls(**{**values, **explicit})
        except ConfigError as error:
            if not taken:
                raise
            raise ConfigError(f"{error} (Set here: {', '.join(taken)}.)") from None


@dataclass(frozen=True)
class Cluster:
    """The job that this process belongs to, as its DMLC_* variables say.

    Parameters
    ----------
    role : str
        'worker', 'server' or 'scheduler'.
    num_workers, num_servers : int
        Counts, >= 1.
    job : str
        The launcher's name for the job; '' when somebody else started it.
    worker_id : int, optional
        The rank that the launcher gave to this worker.
    bigarray_bound : int
        MXNET_KVSTORE_BIGARRAY_BOUND, numbers: larger arrays are cut over servers.
    require_own_server : bool
        ODSGD_REQUIRE_OWN_SERVER: whether a server in MXNet's own loop is an error.
    """

    role: str
    num_workers: int
    num_servers: int
    job: str = ""
    worker_id: int | None = None
    bigarray_bound: int = 1000 * 1000
    require_own_server: bool = False

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] | None = None
    ) -> Cluster | None:
        """The job described by DMLC_*; None (stand-alone) when none is set.

        Parameters
        ----------
        environ : mapping, optional
            The variables; `os.environ` when left out.

        Raises
        ------
        ConfigError
            A DMLC_* variable is missing or malformed.
        """
        environ = os.environ if environ is None else environ
        if not any(environ.get(name) for name in _CLUSTER):
            return None
        missing = [name for name in _CLUSTER if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} not set, although "
                f"{', '.join(n for n in _CLUSTER if environ.get(n))} is. A "
                f"distributed job needs all of {', '.join(_CLUSTER)}. {HOW_TO_START}"
            )
        check_role(environ["DMLC_ROLE"])
        _positive("DMLC_PS_ROOT_PORT", environ["DMLC_PS_ROOT_PORT"])
        bound = _positive(_BOUND, environ.get(_BOUND) or "1000000")
        if bound < LEAST_BIGARRAY_BOUND:
            raise ConfigError(
                f"{_BOUND} is {bound}; dist_odsgd needs at least "
                f"{LEAST_BIGARRAY_BOUND}, as a server's status must not be cut."
            )
        worker_id = environ.get("DMLC_WORKER_ID") if environ.get("ODSGD_JOB") else None
        return cls(
            role=environ["DMLC_ROLE"],
            num_workers=_positive("DMLC_NUM_WORKER", environ["DMLC_NUM_WORKER"]),
            num_servers=_positive("DMLC_NUM_SERVER", environ["DMLC_NUM_SERVER"]),
            job=environ.get("ODSGD_JOB", ""),
            worker_id=None if not worker_id else _whole("DMLC_WORKER_ID", worker_id),
            bigarray_bound=bound,
            require_own_server=_switch("ODSGD_REQUIRE_OWN_SERVER", environ),
        )


def job_key(environ: Mapping[str, str] | None = None) -> bytes:
    """The secret that seals this job's commands; empty when there is none.

    Parameters
    ----------
    environ : mapping, optional
        The variables; `os.environ` when left out.

    Raises
    ------
    ConfigError
        ODSGD_KEY_FILE cannot be read, or other users may read it.
    """
    environ = os.environ if environ is None else environ
    if environ.get("ODSGD_KEY"):
        return environ["ODSGD_KEY"].encode()
    path = environ.get("ODSGD_KEY_FILE")
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ConfigError(
                    f"ODSGD_KEY_FILE {path} may be read by other users; allowed is "
                    f"mode 0600. Run: chmod 600 {path}"
                )
            key = file.read().strip()
    except OSError as error:
        raise ConfigError(f"ODSGD_KEY_FILE cannot be read: {error}") from None
    if not key:
        raise ConfigError(f"ODSGD_KEY_FILE {path} is empty; put a random secret in it.")
    return key


def set_log_level(environ: Mapping[str, str] | None = None) -> None:
    """Set the level of this package's loggers from ODSGD_LOG_LEVEL, if that is set.

    Parameters
    ----------
    environ : mapping, optional
        The variables; `os.environ` when left out.

    Raises
    ------
    ConfigError
        It is not the name of a level.
    """
    level = (os.environ if environ is None else environ).get("ODSGD_LOG_LEVEL", "")
    if level and level.upper() not in _LOG_LEVELS:
        raise ConfigError(
            f"ODSGD_LOG_LEVEL is {level!r}; allowed are {', '.join(_LOG_LEVELS)}."
        )
    if level:
        logging.getLogger(__package__).setLevel(level.upper())


def _check_rule(rule: Any, params: Any) -> None:
    """The rule is a name, and only an optimizer's name comes with parameters."""
    if not isinstance(rule, str) or not rule:
        raise ConfigError(
            f"local_optimizer is {rule!r}; allowed are "
            f"{', '.join(repr(r) for r in RULES_WITHOUT_PARAMETERS)}, 'dcsgd' or the name "
            "of a registered optimizer such as 'sgd'."
        )
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"local_optimizer_params is {params!r}; allowed is a dict such as "
            "{'learning_rate': 0.1}."
        )
    if params and rule.lower() in RULES_WITHOUT_PARAMETERS:
        raise ConfigError(
            f"local_optimizer {rule!r} was given the parameters {dict(params)!r} and "
            "takes none: it follows the global optimizer. Leave them out, or name an "
            "optimizer, such as local_optimizer='sgd' (ODSGD_LOCAL_OPTIMIZER=sgd)."
        )


def _check_compression(params: Any) -> None:
    """Type, threshold and full_every are what compression takes."""
    allowed = "allowed are {'type': 'fp16'} and {'type': '2bit', 'threshold': 0.5, "
    allowed += "'full_every': 10}, where the last two may be left out."
    known = {"fp16": {"type"}, "2bit": {"type", "threshold", "full_every"}}
    kind = params.get("type") if isinstance(params, Mapping) else None
    is_known = params == {} or isinstance(kind, str) and kind in known
    if not isinstance(params, Mapping) or not is_known:
        raise ConfigError(f"compression_params is {params!r}; {allowed}")
    unknown = sorted(map(str, params.keys() - known.get(kind, set())))
    if unknown:
        raise ConfigError(f"compression_params has {', '.join(unknown)}; {allowed}")
    threshold = params.get("threshold", 0.5)
    is_number = isinstance(threshold, numbers.Real) and not isinstance(threshold, bool)
    if not is_number or not 2.0**-126 <= threshold <= 2.0**127:
        raise ConfigError(
            f"compression_params has the threshold {threshold!r}; allowed is a number "
            "above 0 that float32 holds: what a number that is sent stands for."
        )
    every = params.get("full_every", 1)
    is_whole = isinstance(every, numbers.Integral) and not isinstance(every, bool)
    if not is_whole or every < 1:
        raise ConfigError(
            f"compression_params has full_every {every!r}; allowed is a whole number "
            "from 1 (all whole), or leave it out."
        )


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise ConfigError(
            f"{name} is {value!r}; allowed is a whole number of steps, 0 or more "
            "(0 disables it)."
        )


def _whole(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"{variable} is {text!r}; a whole number is allowed."
        raise ConfigError(message) from None


def _positive(variable: str, text: str) -> int:
    value = _whole(variable, text)
    if value < 1:
        raise ConfigError(f"{variable} is {text!r}; allowed is a whole number from 1.")
    return value


def _switch(variable: str, environ: Mapping[str, str]) -> bool:
    text = environ.get(variable) or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"{variable} is {text!r}; allowed are 0 and 1.")
    return text == "1"


def _learning_rate(variable: str, text: str) -> dict[str, float]:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{variable} is {text!r}; a number is allowed, such as 0.1.")
    return {"learning_rate": value}


_VARIABLES: tuple[tuple[str, str, Any], ...] = (
    ("warmup_steps", "ODSGD_WARMUP_STEPS", _whole),
    ("local_optimizer", "ODSGD_LOCAL_OPTIMIZER", lambda variable, text: text),
    ("local_optimizer_params", "ODSGD_LOCAL_LR", _learning_rate),
    ("delay", "ODSGD_DELAY", _whole),
)
