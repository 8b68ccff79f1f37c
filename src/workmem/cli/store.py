"""`workmem store`: one store for a host, and looking at one's folder. Commands load when they run."""

from __future__ import annotations

from cyclopts import App

app = App(name="store", help="Share a store; look at its folder, check it, tidy it, take pages out of it.")
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
app.command(
    "workmem.cli.store_serve:serve", name="serve", help="Serve one store to the processes of this host."
)
app.command(
    "workmem.cli.store_purge:purge",
    name="purge",
    help="Take a tenant, a model or an epoch out, running or stopped.",
)
app.command(
    "workmem.cli.store_scrub:scrub", name="scrub", help="Have the host's store check its pages on disk now."
)
