"""Sum over replicas the metrics that TRL's trainers append to lists while they compute a loss."""

from __future__ import annotations

from typing import Any


class ListedMetrics:
    """Collects the metrics that one microbatch appends to the lists of a TRL trainer.

    The object is made before the microbatch is computed.

    Args:
        trainer: a trainer; one that is not of TRL has no metric lists, so that nothing is collected.
        mode: `train` or `eval`.
    """

    def __init__(self, trainer: Any, mode: str) -> None:
        self._trainer = trainer
        self._lists = getattr(trainer, "_metrics", {}).get(mode, {})
        self._before = {name: len(values) for name, values in self._lists.items()}
        self._tokens = getattr(trainer, "_total_train_tokens", 0)

    def taken(self, weight: float) -> dict[str, float]:
        """Remove the entries that the microbatch has appended; return each one times `weight`, by name.

        The number of tokens is not multiplied.
        """
        tokens = getattr(self._trainer, "_total_train_tokens", 0) - self._tokens
        appended = {
            name: float(values.pop())
            for name, values in self._lists.items()
            if len(values) > self._before.get(name, 0)
        }
        if self._before.get("num_tokens"):
            self._lists["num_tokens"] = [self._tokens]
        weighted = {f"metric {n}": v * weight for n, v in appended.items() if n != "num_tokens"}
        if hasattr(self._trainer, "_total_train_tokens"):
            weighted["trl tokens"], self._trainer._total_train_tokens = tokens, self._tokens
        return weighted

    def add(self, sums: dict[str, Any]) -> None:
        """Append the means over all replicas to the lists; `sums` are the summed results of `taken`."""
        for name, value in sums.items():
            if name.startswith("metric "):
                self._lists[name.removeprefix("metric ")].append(value / sums["weight"])
        if "trl tokens" in sums:
            self._trainer._total_train_tokens += int(sums["trl tokens"])
            self._lists["num_tokens"] = [self._trainer._total_train_tokens]
