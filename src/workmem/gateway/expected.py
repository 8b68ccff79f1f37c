"""What a request will probably need, and what its answer taught."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from workmem.core.outcomes import COMPUTED
from workmem.gateway.servers import UpstreamServer
from workmem.gateway.split_bodies import exact_tokens
from workmem.gateway.usage_peek import UNREPORTED, UsagePeek
from workmem.policy.learned_costs import BytesPerToken

_SESSIONS_MAX = 4096
_MODELS_MAX = 64


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A generation whose answer has passed whole."""

    server: UpstreamServer
    model: str
    session: str
    body_bytes: int
    has_ids: bool
    """Whether the prompt came as token ids, whose bytes say nothing of texts."""
    handed_tokens: int
    """What a prefill server computed of what was expected to be missing; 0 where nothing was handed over."""
    first_token_s: float | None
    """From sending it to its first token, where that could be seen."""


class Expectations:
    """Prompt sizes by model, hits by session, and costs by server, from the answers that passed."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str, BytesPerToken] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], int] = OrderedDict()

    def prompt_tokens(self, model: str, body: bytes, fields: Mapping[str, Any]) -> int:
        """Expected size of a prompt."""
        exact = exact_tokens(fields)
        return self._ratio(model).tokens(len(body)) if exact is None else exact

    def hit_tokens(self, session: str, server: UpstreamServer, prompt_tokens: int) -> int:
        """What `server` probably still has of it: the session's turn before, prompt and answer."""
        return min(prompt_tokens, self._sessions.get((session, server.url), 0)) if session else 0

    def learn(self, ended: Ended, seen: UsagePeek) -> None:
        """Take in what an answer said of itself."""
        usage = seen.usage
        if usage is None or not usage.prompt_tokens:
            return
        if not ended.has_ids:
            self._ratio(ended.model).learn(ended.body_bytes, usage.prompt_tokens)
        if ended.session:
            key = (ended.session, ended.server.url)
            self._sessions[key] = usage.prompt_tokens + usage.completion_tokens
            self._sessions.move_to_end(key)
            if len(self._sessions) > _SESSIONS_MAX:
                self._sessions.popitem(last=False)
        costs, first_s = ended.server.costs, ended.first_token_s
        computed = None if UNREPORTED in usage.by_source else usage.by_source.get(COMPUTED, 0)
        if ended.handed_tokens:
            if first_s is None and seen.waited_s is not None:
                # An answer in one piece does not show its first token, but says how long it waited for the pages, and
                # how much of them did not come.
                known = costs.costs()
                first_s = seen.waited_s + known.hop_s + (computed or 0) * known.computed_token_s
            if first_s is not None:
                costs.learn_handover(ended.handed_tokens, first_s, computed)
        elif first_s is not None and computed is not None:
            costs.learn_computing(computed, first_s)

    def _ratio(self, model: str) -> BytesPerToken:
        ratio = self._ratios.setdefault(model, BytesPerToken())
        self._ratios.move_to_end(model)
        if len(self._ratios) > _MODELS_MAX:
            self._ratios.popitem(last=False)
        return ratio
