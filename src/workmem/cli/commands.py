"""All commands, by name. Each lives in its own module, which loads when the command runs."""

from __future__ import annotations

from cyclopts import App

from workmem import __version__
from workmem.cli.cluster import app as cluster
from workmem.cli.store import app as store
from workmem.cli.vllm import app as vllm

app = App(
    name="workmem",
    help="The working memory of an agent fleet: compute a context once, reuse it everywhere.",
    version=__version__,
    # main() turns an interrupt into an exit code.
    suppress_keyboard_interrupt=False,
)
app.command("workmem.cli.serve:serve", name="serve", help="Serve an OpenAI-compatible endpoint.")
app.command(
    "workmem.cli.explain:explain",
    name="explain",
    help="Show where a request's prompt came from, span by span.",
)
app.command(
    "workmem.cli.lint:lint",
    name="lint",
    help="Replay recorded requests: which lose the prefix of earlier ones, why, and what repairs it.",
)
app.command(
    "workmem.cli.doctor:doctor",
    name="doctor",
    help="Probe a running server: does it reuse prompts, does it say so, and what keeps it from it.",
)
app.command(
    "workmem.cli.rules:rules",
    name="rules",
    help="List the rules by which prompts that mean the same get one form.",
)
app.command(
    "workmem.cli.demo:demo", name="demo", help="Agents at work with reuse off, on, and after a restart."
)
app.command(
    "workmem.cli.size:size", name="size", help="How much memory and disk the contexts of a fleet take."
)
app.command(
    "workmem.cli.version:version", name="version", help="Print versions of workmem and of what it runs on."
)

config = App(name="config", help="Look at the configuration.")
config.command("workmem.cli.configure:show", name="show", help="Print every setting as TOML.")
config.command(
    "workmem.cli.configure:check", name="check", help="Read all sources and say whether they are sound."
)
config.command(
    "workmem.cli.configure:reference", name="reference", help="Print the reference page as Markdown."
)
app.command(config)

index = App(name="index", help="Look at what engines hold.")
index.command(
    "workmem.cli.index_watch:watch", name="watch", help="Show live which contexts engines hold, and where."
)
app.command(index)

model = App(name="model", help="Prepare models.")
model.command("workmem.cli.model:prepare_model", name="prepare", help="Make a model ready to be loaded.")
model.command("workmem.cli.model:list_models", name="list", help="List the models known by name.")
app.command(model)
app.command(cluster)
app.command(store)
app.command(vllm)
