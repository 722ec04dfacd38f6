"""The parameter server: every worker holds a copy of the model, and gradients meet in servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lockstep.exchange.choose import POWERSGD_KEYWORDS
from lockstep.exchange.links import Links
from lockstep.exchange.server import ServerExchange
from lockstep.strategies.ddp import ReplicatedModel, spans_devices
from lockstep.strategies.model_context import ModelContext


class ServedModel(ReplicatedModel):
    """A replicated model whose gradients are summed by servers; every worker updates its own copy."""

    def __init__(
        self, module: nn.Module, holding: ModelContext, links: Links, settings: dict[str, Any]
    ) -> None:
        assert holding.group is not None
        exchange = ServerExchange(links, holding.forest)
        of_all = holding.block, holding.replicas, holding.group, exchange, settings
        super().__init__(module, *of_all, holding.exchanging)
        self._links, self._say = links, holding.say

    def ends(self) -> dict[str, int]:
        """Say what the servers have moved; return what this rank has."""
        return tell(self._links, self._say)


def hold_served(
    module: nn.Module, holding: ModelContext, settings: dict[str, Any], links: Links
) -> ServedModel:
    """Hold a copy of `module` whose gradients meet in the servers that `links` lead to."""
    settings = {k: v for k, v in settings.items() if k not in POWERSGD_KEYWORDS}
    if holding.device.type == "cuda" and not spans_devices(module):
        settings = {"device_ids": [holding.device.index], **settings}
    return ServedModel(module, holding, links, settings)


def tell(links: Links, say: Callable[[str], None]) -> dict[str, int]:
    """Let one model of one rank say what the servers have moved; return what this rank has."""
    if links.tells:
        for line in links.counts():
            say(f"lockstep: {line}")
    return {"sent": links.sent, "received": links.received}
