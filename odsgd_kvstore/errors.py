"""The exceptions of this package, in one tree.

::

    ODSGDError
    +-- ConfigError (ValueError)          a setting, argument or variable is wrong
    +-- EnvironmentNotSupported (ImportError)  Python, NumPy or MXNet is unsuitable
    +-- NotSupportedYet (NotImplementedError)  known, planned, and refused by name
    +-- LaunchError (RuntimeError)        a job could not be started
    +-- JobError (RuntimeError)           the job cannot go on
        +-- HandshakeError                a server does not run our updater
        +-- MismatchError                 ranks disagree on what they do together
        +-- ServerError                   a server failed; carries its traceback
        +-- JobTimeout (TimeoutError)     a job did not end in time

Every class is also a builtin exception, so callers need not know this module.
"""


class ODSGDError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ODSGDError, ValueError):
    """A setting, an argument or an environment variable is not allowed."""


class EnvironmentNotSupported(ODSGDError, ImportError):
    """This Python, NumPy or MXNet cannot run the package."""


class NotSupportedYet(ODSGDError, NotImplementedError):
    """A feature that exists elsewhere and is not built here yet."""


class LaunchError(ODSGDError, RuntimeError):
    """A job's processes could not be started."""


class JobError(ODSGDError, RuntimeError):
    """The running job cannot go on."""


class HandshakeError(JobError):
    """A server of this job does not run our updater, or another version of it."""


class MismatchError(JobError):
    """The ranks of this job do not agree on what they do together."""


class ServerError(JobError):
    """A server failed; the message carries the server's own traceback."""


class JobTimeout(JobError, TimeoutError):
    """A job did not end within its time limit."""
