"""What an interpreter says of itself: its version, MXNet's, and this package's.

Runs on each host, see `probe`.
"""

import errno
import json
import os
import re
import signal
import subprocess

from odsgd_kvstore.launch.shims import shim_argv

LIMIT_S = 75  # MXNet's first import from a network file system takes long.
MARK = "odsgd-facts "
TEXTS = ("python", "executable", "package", "mxnet", "numpy")
TEXTS += ("python_error", "package_error", "mxnet_error")
# What an interpreter says of itself; Python 2 can read it, too. The package comes
# first, as it sets the aliases that MXNet needs.
FACTS = r"""
import json, sys
facts = {"python": "%d.%d.%d" % sys.version_info[:3], "executable": sys.executable}
def why(error):
    return "%s: %s" % (type(error).__name__, error)
try:
    import odsgd_kvstore
    facts["package"] = odsgd_kvstore.__version__
except BaseException as error:
    facts["package_error"] = why(error)
try:
    import numpy
    facts["numpy"] = numpy.__version__
    if "bool" not in vars(numpy):
        numpy.bool = bool
    import mxnet
    facts["mxnet"] = mxnet.__version__
    facts["dist_kvstore"] = mxnet.runtime.Features().is_enabled("DIST_KVSTORE")
except BaseException as error:
    facts["mxnet_error"] = why(error)
print("\n" + "MARK" + json.dumps(facts))
""".replace("MARK", MARK)


class Facts:
    """A process of the interpreter that the roles will be run with."""

    def __init__(self, python: str, env: dict, cwd: str) -> None:
        self.found = {"dist_kvstore": False, **dict.fromkeys(TEXTS, "")}
        # With a role it would serve, and a job's key is not needed.
        env = {k: v for k, v in env.items() if not k.startswith(("DMLC_", "ODSGD_KEY"))}
        self._python = python
        self.process = None
        try:
            os.stat(python)
            if not os.access(python, os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self.process = subprocess.Popen(
                # Writes nothing, and ends with us.
                shim_argv(os.getpid(), [python, "-B", "-c", FACTS]),
                env=env,
                cwd=cwd if cwd and os.path.isdir(cwd) else None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self._fail(f"cannot be run: {error.strerror}")

    def close(self) -> None:
        """End the process if it has not ended."""
        if self.process is not None:
            with self.process:  # Closes its files and waits for it.
                self.process.kill()

    def read(self) -> dict:
        """Wait for the facts."""
        if self.process is None:
            return self.found
        try:
            output, errors = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            text = f"did not import MXNet within {LIMIT_S} s"
            self._fail(text)
            return self.found
        output, errors = (x.decode(errors="replace") for x in (output, errors))
        _, mark, facts = output.rpartition("\n" + MARK)
        try:
            self.found.update(json.loads(facts if mark else ""))
        except ValueError:
            self._explain(output, errors)
        return self.found

    def _explain(self, output: str, errors: str) -> None:
        """Say why there are no facts."""
        lines = (output + "\n" + errors).strip().splitlines()
        said = f"; it wrote {lines[-1].strip()[:200]!r}" if lines else ""
        version = re.search(r"Python (\d+\.\d+(\.\d+)?)", output + errors)
        self.found["python"] = version.group(1) if version else ""
        code = self.process.returncode
        known = {number.value: number.name for number in signal.Signals}
        how = f"exit code {code}"
        if code < 0:
            how = "signal {} ({})".format(-code, known.get(-code, "real-time"))
        text = f"ended with {how} in place of its versions{said}"
        self._fail(text)

    def _fail(self, text: str) -> None:
        """Record an error."""
        self.found["python_error"] = f"{self._python} {text}"
