"""`workmem cluster`: memory that hosts share, run by Mooncake. Commands load when they run."""

from __future__ import annotations

from cyclopts import App

app = App(name="cluster", help="Share memory among hosts: take part, look at it, find out what is wrong.")
app.command(
    "workmem.cli.cluster_up:up", name="up", help="Take part: a master or none, and this host's memory."
)
app.command(
    "workmem.cli.cluster_status:status", name="status", help="Show masters, segments and what they hold."
)
app.command(
    "workmem.cli.cluster_doctor:doctor",
    name="doctor",
    help="Check what operators get wrong; exit code 1 where something is.",
)
