"""`GET /v1/models` and the check of a request's `model`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from workmem.core.errors import UnknownModel
from workmem.core.generation import Engine, ModelInfo
from workmem.gateway.exchange import Answer, Exchange, state_of
from workmem.gateway.failures import json_response


def require_model(engine: Engine, name: str) -> None:
    """Raises UnknownModel unless `name` is served."""
    served = engine.info.name
    if name != served:
        raise UnknownModel(
            f"The model {name[:256]!r} does not exist here; served: {served!r}.", param="model"
        )


async def list_models(exchange: Exchange) -> Answer:
    """`GET /v1/models`."""
    engine: Engine = state_of(exchange.request, "service").engine
    name = engine.info.name
    # What is below "data" is Anthropic's, for its clients.
    pages = {"has_more": False, "first_id": name, "last_id": name}
    return json_response({"object": "list", "data": [_body(engine.info)], **pages})


async def get_model(exchange: Exchange) -> Answer:
    """`GET /v1/models/{id}`."""
    engine: Engine = state_of(exchange.request, "service").engine
    require_model(engine, exchange.request.path_params["id"])
    return json_response(_body(engine.info))


def _body(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "workmem",
        "max_model_len": info.max_context,
        "type": "model",
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(info.created, UTC).isoformat(),
        "workmem": {"fingerprint": info.fingerprint, "dtype": info.dtype},
    }
