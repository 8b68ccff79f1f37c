"""Places in the body of a request: what a rule may change and what an explanation may name, whatever the API.

A place holds on to the object it stands in, so writing to it changes the body. Paths are those of the client's
own body, such as `system[0].text` or `messages[3].tool_calls[0].function.arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class ToolPlace(NamedTuple):
    """A tool that a client defines. One that the server itself brings (a web search) is no place."""

    path: str
    """Such as `tools[2]`."""
    number: int
    """Index into the body's `tools`."""
    tool: dict[str, Any]
    """The entry of `tools`."""
    function: dict[str, Any]
    """The object with `name`, `description` and the schema: the entry itself, or its `function`."""
    function_path: str
    schema_key: str
    """Under which `function` has its JSON schema."""

    @property
    def name(self) -> str:
        """The tool's name; empty where the client sent none."""
        name = self.function.get("name")
        return name if isinstance(name, str) else ""


class TextPlace(NamedTuple):
    """A piece of text that the model reads."""

    path: str
    role: str
    """system, user, assistant, or tool (the result of a call)."""
    turn: int
    """Position of its message in the history, -1 for instructions that stand outside of it."""
    holder: Any
    key: str | int
    kind: str = "text"
    """text, or thinking."""

    @property
    def text(self) -> str:
        """What it says now."""
        return self.holder[self.key]

    def write(self, text: str) -> None:
        """Say something else."""
        self.holder[self.key] = text


class CallPlace(NamedTuple):
    """A call that the model made, as the client sends it back."""

    path: str
    """Of the object that holds the arguments."""
    turn: int
    holder: dict[str, Any]
    """The object with the name and the arguments."""
    arguments_key: str
    """Under which it has the arguments: JSON text, or an object in Anthropic's API."""
    ids: dict[str, Any]
    """The object with the call's id."""
    id_key: str

    @property
    def arguments_path(self) -> str:
        """Path of the arguments."""
        return f"{self.path}.{self.arguments_key}"


class ResultPlace(NamedTuple):
    """The result of a call: it names the call by its id."""

    path: str
    turn: int
    holder: dict[str, Any]
    id_key: str


class Dialect(NamedTuple):
    """An API. All functions read a decoded body of any shape, and pass over what is not of theirs."""

    name: str
    path: str
    """Of its endpoint."""
    history_key: str
    """Under which a body has its messages, or items."""
    tools: Callable[[Mapping[str, Any]], Iterator[ToolPlace]]
    texts: Callable[[Mapping[str, Any]], Iterator[TextPlace]]
    """In the order in which templates write them: instructions first, then the history."""
    calls: Callable[[Mapping[str, Any]], Iterator[CallPlace]]
    results: Callable[[Mapping[str, Any]], Iterator[ResultPlace]]


def objects_in(value: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a list, each with its index; nothing where it is no list."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield index, item


def texts_of(holder: Any, key: str | int, path: str, role: str, turn: int) -> Iterator[TextPlace]:
    """The texts of a content: a string, or a list of parts of which some have `text`, or another content."""
    value = holder[key]
    if isinstance(value, str):
        yield TextPlace(path, role, turn, holder, key)
        return
    for index, part in objects_in(value):
        if isinstance(part.get("text"), str):
            yield TextPlace(f"{path}[{index}].text", role, turn, part, "text")
