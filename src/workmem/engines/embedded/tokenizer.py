"""Text to token ids, and chat messages to a prompt whose every token knows the field it renders."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workmem.core.errors import ClientError, ConfigError
from workmem.core.generation import KnownTurn, RenderedPrompt, ThinkingState
from workmem.engines.embedded.known_turns import KnownTurns
from workmem.engines.embedded.prompt_spans import Needle, locate, spans_of_tokens
from workmem.prompt.default_tools import as_plain_chat, developer_as_system, late_system_as_user
from workmem.prompt.thinking import CLOSE, OPEN

END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>")
"""Ends of an assistant's turn that configurations forget to list as end of text."""
_LATE_SYSTEM = ("system", "user", "system", "assistant", "user")
_LATE_USER = ("system", "user", "user", "assistant", "user")


class ModelTokenizer:
    """The tokenizer and chat template of a model folder (or GGUF file). Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        gguf = {"gguf_file": folder.name} if folder.is_file() else {}
        place = folder.parent if gguf else folder
        try:
            self.hf: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(
                place, local_files_only=True, **gguf
            )
            # The fast core has no shared mutable state, unlike the wrapper's padding and truncation.
            self.backend: Tokenizer = self.hf.backend_tokenizer
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            if not gguf and not (folder / "tokenizer.json").is_file():
                text = f"$.engine.model: {folder} has no tokenizer.json; copy it there from where the model comes from"
                raise ConfigError(text) from error
            reason = " ".join(str(error).split())
            raise ConfigError(f"$.engine.model: {folder} has no usable tokenizer: {reason}") from error
        self.eos_ids = _eos_ids(folder, self.hf)
        self._known_turns = KnownTurns(self.backend, self.eos_ids)
        self._check_template(folder)
        self._takes_late_system = self._takes(_LATE_SYSTEM) or not self._takes(_LATE_USER)
        self._reserved = frozenset(inspect.signature(self.hf.apply_chat_template).parameters) - {"documents"}

    def _check_template(self, folder: Path) -> None:
        """A template that cannot be parsed is the operator's to mend, at the start, not a client's."""
        if not self.hf.chat_template:
            return
        try:
            self.hf.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"$.engine.model: the chat template of {folder} is broken at line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError):
            # It can be parsed; that it does not like this one chat says nothing about others.
            return

    def _takes(self, roles: Sequence[str]) -> bool:
        """Whether the template renders a chat of these roles."""
        if not self.hf.chat_template:
            return True
        chat = [{"role": role, "content": "Hello"} for role in roles]
        try:
            self.hf.apply_chat_template(chat, tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError):
            return False
        return True

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with the leading token the model expects, if any."""
        return self.backend.encode(text, add_special_tokens=True).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones too; part of a character shows as U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        passages: Mapping[str, Sequence[str]] | None = None,
        known: Sequence[KnownTurn] = (),
    ) -> RenderedPrompt:
        """Render `messages` up to the assistant's turn. See `Engine.render_chat`; raises ClientError."""
        kwargs = dict(template_kwargs or {})
        for name in sorted(self._reserved & kwargs.keys()):
            raise ClientError(f"chat_template_kwargs.{name} cannot be set", param="chat_template_kwargs")
        template = self._template(tools)
        chat = list(messages) if "developer" in template else developer_as_system(messages)
        if not self._takes_late_system:
            chat = late_system_as_user(chat)
        if "tools" in template:
            given, joined = list(tools), []
            chat = [_parsed_calls(message) for message in chat]
            paths = [f"messages[{index}].content" for index in range(len(chat))]
        else:
            given = []
            plain = as_plain_chat(chat, tools)
            chat, paths, joined = plain.messages, plain.paths, [plain.passages]
        text = self._apply(template, chat, given, kwargs)
        needles = _needles(chat, paths)
        marked = self._mark(template, chat, given, kwargs, needles)
        joined.append(
            {
                path: [(f"{path}[{n}]", one) for n, one in enumerate(texts)]
                for path, texts in (passages or {}).items()
            }
        )
        encoded = self._known_turns.encode(text, messages, known)
        spans = spans_of_tokens(locate(text, marked, needles, tools, joined), encoded.offsets)
        return RenderedPrompt(
            token_ids=encoded.token_ids,
            spans=spans,
            thinking=_thinking(template, text),
            text=text,
            known=encoded.outcomes,
        )

    def _template(self, tools: Sequence[dict[str, Any]]) -> str:
        if self.hf.chat_template is None:
            raise ClientError(
                "This model has no chat template: use /v1/completions, or serve an instruction-tuned model",
                param="messages",
            )
        return self.hf.get_chat_template(tools=list(tools) or None)

    def _apply(
        self, template: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]], kwargs: dict[str, Any]
    ) -> str:
        given: Any = tools or None
        try:
            rendered: Any = self.hf.apply_chat_template(
                chat,
                tools=given,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
                **kwargs,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is a program over the request's data; what it trips over is in the request.
            raise ClientError(
                f"The model's chat template refuses the messages: {error}", param="messages"
            ) from error
        return rendered

    def _mark(
        self,
        template: str,
        chat: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        kwargs: dict[str, Any],
        needles: Sequence[Needle],
    ) -> str | None:
        """The rendering with a mark in place of each field; None where the template refuses marks."""
        marked: list[dict[str, Any]] = [
            {
                **message,
                "tool_calls": [
                    {**call, "function": dict(call["function"])} for call in message["tool_calls"]
                ],
            }
            if message.get("tool_calls")
            else dict(message)
            for message in chat
        ]
        for needle in needles:
            target = marked[needle.message]
            if needle.call is not None:
                target = target["tool_calls"][needle.call]["function"]
            target[needle.field] = needle.mark
        try:
            return self._apply(template, marked, tools, kwargs)
        except ClientError:
            return None


def _thinking(template: str, text: str) -> ThinkingState:
    """What the rendered `text` asks of the model: templates that know thinking name its marks."""
    if CLOSE not in template or text.rstrip().endswith(CLOSE):
        return "none"
    return "begun" if text.rstrip().endswith(OPEN) else "possible"


def _needles(chat: Sequence[dict[str, Any]], paths: Sequence[str]) -> list[Needle]:
    needles: list[Needle] = []
    for index, (message, path) in enumerate(zip(chat, paths, strict=True)):
        for key in ("reasoning_content", "content"):
            text = message.get(key)
            if isinstance(text, str) and text:
                field = f"{path.removesuffix('content')}{key}"
                needles.append(Needle(len(needles), field, index, None, key, text))
        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = call["function"].get("arguments")
            if arguments:
                field = path.removesuffix("content") + f"tool_calls[{number}].function.arguments"
                needles.append(Needle(len(needles), field, index, number, "arguments", arguments))
    return needles


def _parsed_calls(message: dict[str, Any]) -> dict[str, Any]:
    """`message` with call arguments as objects, as templates expect them; the wire has them as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # A history may hold a broken call; the model sees what it once wrote.
            with contextlib.suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(arguments) if arguments.strip() else {}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _eos_ids(folder: Path, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            value: Any = json.loads(file.read_bytes()).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    own: Any = tokenizer.eos_token_id
    if own is not None:
        found.add(own)
    for token in END_OF_TURN_TOKENS:
        number = tokenizer.backend_tokenizer.token_to_id(token)
        if number is not None:
            found.add(number)
    return frozenset(found)
