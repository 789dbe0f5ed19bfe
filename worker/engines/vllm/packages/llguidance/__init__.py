"""The package `llguidance` of the service, for grammars that allow the same on every engine.

vLLM pins a release that repeats the white space of a JSON schema where the service's takes it once.
The package's one compiled module is for the stable ABI, which all interpreters have in common.
"""

import os
from pathlib import Path

__path__ = [os.environ["PENSTOCK_LLGUIDANCE"]]

_INIT = Path(__path__[0]) / "__init__.py"
exec(compile(_INIT.read_text(), str(_INIT), "exec"))
