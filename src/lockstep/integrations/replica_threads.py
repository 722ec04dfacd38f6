"""`ReplicaThreads`: manual optimization of Lightning, where `training_step` steps optimizers by itself.

`training_step` of each replica of this rank runs in a thread; one thread runs at a time. At `step()` of an
optimizer a thread waits until all replicas have called it. Then the optimizer steps once, and all continue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lockstep.errors import StepError
from lockstep.integrations.lightning_results import numbers_of


class _EndReplica(BaseException):
    """Raised inside a replica's thread to end it, when its `training_step` is not to be continued."""


class _Thread:
    """A thread that runs a function step by step: `resume` runs it up to its next call of `wait`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._threads = function, torch.get_num_threads()
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._left = False
        self._error: BaseException | None = None
        self.is_done = False
        self.result: Any = None
        self.asked: Any = None

    def resume(self) -> None:
        """Run the function until it calls `wait` or returns; raise its exception, if any."""
        self.asked = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, asked: Any) -> None:
        """Wait in the thread until `resume` is called again; the thread's function calls this method.

        `asked`: the optimizer that must step before the thread continues.
        """
        self.asked = asked
        self._stopped.release()
        self._go.acquire()
        if self._left:
            raise _EndReplica

    def leave(self) -> None:
        """End the thread if the function has not returned: its call of `wait` raises `_EndReplica`."""
        if self._thread is not None and not self.is_done:
            self._left = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts for each thread by itself
        try:
            self.result = self._function()
        except _EndReplica:
            pass
        except BaseException as error:
            self._error = error
        self.is_done = True
        self._stopped.release()


class ReplicaThreads:
    """Runs `training_step` of each of this rank's replicas in a thread, up to the next optimizer step."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._threads: dict[tuple[int, bool], _Thread] = {}
        self._running: _Thread | None = None
        self._toggled = False
        module = strategy.lightning_module
        if not module.automatic_optimization:
            module.toggle_optimizer, module.untoggle_optimizer = self._toggle, lambda _: None

    def _toggle(self, _optimizer: Any) -> None:
        # Gradients of other parameters are computed, since models of a run don't freeze some, and dropped.
        self._toggled = True

    @property
    def is_inside(self) -> bool:
        """Whether the code of a replica's `training_step` is running now."""
        return self._running is not None

    def wait_for_step(self, optimizer: Any) -> None:
        """Wait in `training_step` until `optimizer` has stepped for all replicas."""
        assert self._running is not None
        self._running.wait(optimizer)

    def train(self, batch: Any, rest: Any, results: Any) -> Any:
        """Train on a global batch; return the means over replicas of the results of `training_step`.

        Args:
            batch: the global batch; each iteration over it yields this rank's microbatches.
            rest: further arguments of `training_step`.
            results: the `GlobalResults` object that collects logged values.
        """
        strategy = self._strategy
        try:
            while True:
                sums = strategy.run.sum(self._turn(batch, rest, results), per_sample=False)
                if not sums["open"]:
                    break
                if sums["open"] != sums["replicas"]:
                    raise StepError(
                        f"training_step called step() of an optimizer for {sums['open']} of "
                        f"{sums['replicas']} replicas; expected the same steps for each",
                        hint="decide by batch_idx, and not by the samples",
                    )
                self._step()
        finally:
            for thread in self._threads.values():
                thread.leave()
            self._threads.clear()
        results.apply(sums, strategy.root_device)
        return results.outputs(sums, strategy.root_device) or None

    def _turn(self, batch: Any, rest: Any, results: Any) -> Iterator[dict[str, Any]]:
        """Run each replica's `training_step` up to its next optimizer step, or to its end.

        Yields a dictionary for each replica, which `run.sum` adds up. In it, `open` is 1 while the replica
        waits for an optimizer step, and 0 at the end or without samples. At the end, the dictionary has the
        logged and returned values. The arguments are those of `train`.
        """
        run = self._strategy.run
        for data in batch:
            microbatch = run._loop.require_microbatch("training_step")
            key = microbatch.replica, microbatch.audit
            if key not in self._threads:
                self._threads[key] = _Thread(self._function(data, rest, results))
            thread = self._threads[key]
            self._resume(thread)
            size = int(microbatch.size > 0)
            if thread.is_done:
                output, taken = thread.result
                yield {"open": 0, **taken, **numbers_of(output, run)}
            else:
                yield {"open": size, "replicas": size}

    def _function(self, data: Any, rest: Any, results: Any) -> Callable[[], Any]:
        strategy = self._strategy

        def call() -> Any:
            output = strategy.compute(data, rest, strategy.lightning_module.training_step)
            return output, results.taken()

        return call

    def _resume(self, thread: _Thread) -> None:
        """Continue `thread` inside a forward pass of the model, so that hooks of `run.model` are called."""
        module = self._strategy.lightning_module
        forward = module.forward

        def resume(*_: Any) -> None:
            module.forward = forward
            thread.resume()

        self._running = thread
        try:
            module.forward = resume
            self._strategy.model()
        finally:
            module.forward = forward
            self._running = None

    def _step(self) -> None:
        """Step, once, the optimizer whose `step()` all replicas' threads have called."""
        strategy = self._strategy
        module = strategy.lightning_module
        asked = {id(thread.asked): thread.asked for thread in self._threads.values()}
        if len(asked) > 1:
            raise StepError(
                "replicas wait for steps of different optimizers; expected the same steps for each",
                hint="decide by batch_idx, and not by the samples",
            )
        (optimizer,) = asked.values()
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def step() -> None:
            strategy.precision_plugin._after_closure(module, optimizer)
            optimizer.step()

        module.trainer.fit_loop.epoch_loop.manual_optimization.count(optimizer, step)
        for parameter in module.parameters() if self._toggled else ():
            if id(parameter) not in own:
                parameter.grad = None
