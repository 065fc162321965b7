"""Python runs this at its start in what the tests launch while a fault is planted: there it is planted, too.

`tests.planted.pass_on` puts this folder on their PYTHONPATH, and the fault into their environment.
"""

import json
import os
import sys
from pathlib import Path

if "PLANTED" in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.planted import Fault, plant

    sys.path.pop(0)
    plant(Fault(*json.loads(os.environ["PLANTED"])))
