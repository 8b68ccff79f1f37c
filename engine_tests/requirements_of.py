"""Print what an installed package requires, one requirement a line, but for those named behind it.

A wheel of an engine pins builds of torch and of its kin for GPUs: it is installed alone, and then what it really needs.
"""

import re
import sys
from importlib.metadata import requires

package, *others = sys.argv[1:]
for line in requires(package) or []:
    name = re.match(r"[\w.-]+", line)
    if "extra ==" not in line and name is not None and name[0].lower() not in others:
        print(line)
