"""Answers that must be JSON: forbids, before each choice, the tokens that would break the schema."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from workmem.core.errors import ClientError, EngineError
from workmem.engines.embedded.tokenizer import ModelTokenizer

try:
    import llguidance
    import llguidance.hf
except ImportError:  # The engine can do without; a request that needs it is told so.
    llguidance = None

_PARAM = "response_format"
# One line, as chat templates show calls: models that are led into JSON like to indent it, which costs
# tokens, or to fill it with blank lines for ever.
_ONE_LINE: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class Grammar:
    """Where one answer stands in its schema. Not thread-safe; one per running completion."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._bits = torch.zeros((vocabulary + 31) // 32, dtype=torch.int32)
        self._vocabulary = vocabulary

    @classmethod
    def compile(cls, json_schema: str, tokenizer: ModelTokenizer, *, vocabulary: int) -> Grammar:
        """A grammar at its start. `vocabulary` is the width of a row of logits.

        "{}" allows any JSON value. Answers are one line, with a space after `,` and `:` alone. Raises
        ClientError for a schema that is broken or uses what is not supported. The first call for a tokenizer takes up to a second, later ones milliseconds.
        """
        if llguidance is None:
            raise ClientError(
                "JSON answers need llguidance on the server: pip install llguidance there", param=_PARAM
            )
        schema = _schema(json_schema)
        matcher_type = llguidance.LLMatcher
        grammar = matcher_type.grammar_from_json_schema(json.dumps(schema), overrides=_ONE_LINE)
        matcher = matcher_type(_token_trie(tokenizer, vocabulary), grammar, log_level=0)
        made = cls(matcher, vocabulary)
        if not matcher.is_error():
            # A schema that nothing can satisfy shows only when the first token is asked for.
            matcher.unsafe_compute_mask_ptr(made._bits.data_ptr(), made._bits.numel() * 4)
        if matcher.is_error() or not bool(made._bits.any()):
            reason = matcher.get_error() or "no answer can satisfy it"
            raise ClientError(f"The JSON schema cannot be used: {reason}", param=_PARAM)
        return made

    def mask(self, row: torch.Tensor) -> None:
        """Set the logits (fp32 [vocabulary], in place) of all tokens that may not follow to -inf."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.data_ptr(), self._bits.numel() * 4)
        self._check()
        shifts = torch.arange(32, dtype=torch.int32)
        allowed = ((self._bits[:, None] >> shifts) & 1).bool().view(-1)[: self._vocabulary]
        row.masked_fill_(~allowed.to(row.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        """Advance by a token that `mask` allowed. Raises EngineError for any other."""
        if not self._matcher.consume_token(token_id):
            raise EngineError(f"Token {token_id} does not continue the JSON answer")
        self._check()

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete and only an end-of-text token could follow."""
        return self._matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        """Whether the answer could end here."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"The JSON answer cannot go on: {self._matcher.get_error().splitlines()[0]}")


def _schema(text: str) -> Any:
    try:
        schema: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientError(f"The JSON schema is not JSON: {error}", param=_PARAM) from error
    if not isinstance(schema, (dict, bool)):
        raise ClientError("The JSON schema must be an object", param=_PARAM)
    return schema


@functools.lru_cache(maxsize=4)
def _token_trie(tokenizer: ModelTokenizer, vocabulary: int) -> Any:
    """All tokens as a tree of bytes; costly, so once per tokenizer."""
    assert llguidance is not None
    return llguidance.hf.from_tokenizer(
        tokenizer.hf, n_vocab=vocabulary, eos_token=sorted(tokenizer.eos_ids) or None
    )
