"""Prompts as a model's own tokenizer and chat template make them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from workmem.core.errors import ClientError
from workmem.core.generation import RenderedPrompt
from workmem.engines.embedded.tokenizer import ModelTokenizer
from workmem.linting.rendering import render_plainly
from workmem.linting.translation import as_prompt
from workmem.prompt.dialects.places import Dialect


class TemplateRenderer:
    """See `Renderer`."""

    is_exact = True

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where the folder has no usable tokenizer."""
        self.name = folder.name
        self._tokenizer = ModelTokenizer(folder)
        self._refused: Counter[str] = Counter()

    def render(self, body: dict[str, Any], dialect: Dialect) -> RenderedPrompt:
        """See `Renderer`. What the template does not take, such as images, is written in a plain form instead."""
        try:
            prompt = as_prompt(body, dialect)
            rendered = self._tokenizer.render_chat(
                prompt.messages,
                tools=prompt.tools,
                template_kwargs=prompt.template_kwargs,
                passages=prompt.passages,
            )
        except ClientError as error:
            self._refused[str(error)[:200]] += 1
            return render_plainly(body, dialect, self._encode)
        return RenderedPrompt(token_ids=rendered.token_ids, spans=prompt.in_client_words(rendered.spans))

    def notes(self) -> list[str]:
        """See `Renderer`."""
        return [
            f"{count} prompts are in a plain form instead of the template's: {why}"
            for why, count in self._refused.most_common(3)
        ]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.backend.encode(text, add_special_tokens=False).ids
