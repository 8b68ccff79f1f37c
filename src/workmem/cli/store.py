"""`workmem store`: a store of its own, and looking at one's folder. Commands load when they run."""

from __future__ import annotations

from importlib.util import find_spec

from cyclopts import App

app = App(name="store", help="Look at a store's folder, check it, tidy it, take pages out of it.")
app.command("workmem.cli.store_tools:stat", name="stat", help="What a store's folder holds, in numbers.")
app.command("workmem.cli.store_tools:ls", name="ls", help="List the blocks of a namespace.")
app.command(
    "workmem.cli.store_tools:verify",
    name="verify",
    help="Read every page and check it; exit code 1 on damage.",
)
app.command(
    "workmem.cli.store_tools:gc",
    name="gc",
    help="Give the room of dead pages back, while the store is stopped.",
)
app.command("workmem.cli.store_tools:export", name="export", help="Write pages to a file that numpy reads.")
if find_spec("workmem.cli.store_serve") is not None:
    app.command(
        "workmem.cli.store_serve:serve", name="serve", help="Serve one pool to the processes of this host."
    )
