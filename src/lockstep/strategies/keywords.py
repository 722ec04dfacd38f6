"""What `run.model` takes for some strategies, known without loading what they are made of."""

from __future__ import annotations

from typing import Any

#: What is passed on to torch's `fully_shard`.
SHARDING = ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy")
#: What says how a model is sharded, besides.
OWN_SHARDING = ("wrap", "gather")


def taken_by(strategy: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return `settings` without those for sharding where the strategy is another: one script serves all."""
    if strategy == "fsdp":
        return settings
    return {
        name: value for name, value in settings.items() if name not in (*OWN_SHARDING, *SHARDING)
    }
