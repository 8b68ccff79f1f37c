"""What a client made of the model's answer when it sent it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import msgspec

from workmem.prompt.causes.cause import Cause, cause
from workmem.prompt.causes.turns import turn_causes
from workmem.prompt.causes.view import Atom, TurnView


class MadeCall(msgspec.Struct, frozen=True):
    """A call as it was answered. `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = ""


class Made(msgspec.Struct, frozen=True):
    """What the model generated, as its client got it."""

    text: str = ""
    thinking: str = ""
    calls: tuple[MadeCall, ...] = ()


def answer_causes(made: Made, appended: Sequence[TurnView], *, has_objects: bool = False) -> Iterator[Cause]:
    """Differences between `made` and the assistant's turns at the start of what a client appended.

    None where it appended no such turn: it asked again, and owes nobody the answer. `has_objects`: the API has
    arguments as objects, so that no client can send their spaces back.
    """
    turns = list(takewhile(lambda turn: turn.role == "assistant", appended))
    if not turns or not (made.text or made.calls):
        return
    path = turns[0].path
    now = TurnView(path, "assistant", tuple(_plain(atom) for turn in turns for atom in turn.atoms))
    atoms = [Atom("thinking", "", made.thinking)] if made.thinking else []
    atoms += [Atom("text", "", made.text)] if made.text else []
    for call in made.calls:
        arguments = _spaceless(call.arguments) if has_objects else call.arguments
        atoms.append(_plain(Atom("call", "", arguments, call.name, call.id)))
    if not made.thinking:
        # Its thinking may be known to the client alone.
        now = TurnView(path, "assistant", tuple(atom for atom in now.atoms if atom.kind != "thinking"))
    for one in turn_causes(TurnView("", "assistant", tuple(atoms)), now):
        found = (
            cause("whitespace", one.path, "", one.what)
            if _is_trimmed(made, now) and one.name == "history_rewritten"
            else one
        )
        yield msgspec.structs.replace(
            found, path=found.path or path, path_before="", what=f"{_SAYS}: {found.what}"
        )


def _plain(atom: Atom) -> Atom:
    """`atom` with one prefix for ids of calls, whichever the API gives them."""
    return msgspec.structs.replace(atom, id=f"call_{atom.id[6:]}") if atom.id.startswith("toolu_") else atom


def _spaceless(arguments: str) -> str:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments)).decode()
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments


_SAYS = "the model's answer came back otherwise than it was generated"


def _is_trimmed(made: Made, now: TurnView) -> bool:
    texts = [atom.text for atom in now.atoms if atom.kind == "text"]
    return "".join(texts).split() == made.text.split()
