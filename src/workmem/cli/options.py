"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

ConfigFile = Annotated[
    Path | None,
    Parameter(
        name="--config", help="TOML file with settings; workmem.toml of the working directory unless named."
    ),
]
Settings = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set", negative=(), help="section.key=value; may be repeated and wins over every other source."
    ),
]
Host = Annotated[str | None, Parameter(help="Short for --set server.host=HOST.")]
Port = Annotated[int | None, Parameter(help="Short for --set server.port=PORT.")]
