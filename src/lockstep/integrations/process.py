"""Functions that all adapters use: open a run without a `with` block, and refuse a framework's option."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lockstep.engine.recovery.preemption import Preempted
from lockstep.engine.training.columns import of_all
from lockstep.errors import LockstepError, UsageError
from lockstep.run import Run


class CurrentRun:
    """The run that an adapter has opened in this process, with the run's settings and callbacks.

    Attributes:
        run: the open run, or `None`.
        on_open: function that is called with each new run.
        before_end: functions that each rank calls before the run ends without an error.
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self._settings: dict[str, Any] = {}
        self.on_open: Callable[[Run], None] | None = None
        self.before_end: list[Callable[[], None]] = []

    def open(self, **settings: Any) -> Run:
        """Return the open run if it has these `settings`; else end it and open a new run.

        `settings`: arguments of `lockstep.Run`.
        """
        if self.run is not None and self._settings == settings:
            return self.run
        if self.run is None and not self._settings:
            atexit.register(self._end_with_script)
            sys.exit = _exit
        self.end()
        name = Path(sys.argv[0]).stem.lstrip("-") or "run"
        run = Run(name, progress=False, **settings)
        self.run, self._settings = run.__enter__(), settings
        if os.environ.get("LOCKSTEP_PROGRESS") != "0":  # the framework has the progress bar
            for line in run._session.title_lines():
                run._session.context.record.warn(line)
        if self.on_open is not None:
            self.on_open(run)
        return run

    def end(self, error: BaseException | None = None) -> None:
        """End the open run, if any, as the end of its `with` block would.

        `error`: the exception that ended the script, or `None`.
        """
        run, self.run = self.run, None
        before, self.before_end = self.before_end, []
        if run is not None:
            for act in before if error is None else ():
                act()
            run.__exit__(None if error is None else type(error), error, None)

    def _end_with_script(self) -> None:
        """End the run when Python exits (`atexit`), with the exception that ended the script, if any."""
        error = getattr(sys, "last_value", None)
        try:
            self.end(error)
        except Preempted:
            return  # the script was ended by the same exception, which has set the exit code
        except LockstepError as late:
            if late is error:
                return
            sys.excepthook(type(late), late, late.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(late.exit_code)  # no other way to an exit code from here


def _exit(status: Any = None, /) -> NoReturn:
    """Substitute for `sys.exit` that keeps the exit status in `sys.last_value`, for `_end_with_script`."""
    sys.last_value = SystemExit(status)
    raise sys.last_value


#: The open run of this process, if any.
current = CurrentRun()


def first_value(run: Run, name: str, value: Any) -> Any:
    """Return the `value` that the main rank had in the first launch of the run.

    The first launch writes `value` (numbers, text, `None`, or lists of them) to the file `name`.json in the
    run's directory; later launches read the file and ignore their own `value`.
    """
    path = run.directory / f"{name}.json"
    if run.is_main_process and path.exists():
        value = json.loads(path.read_text())
    elif run.is_main_process:
        path.write_text(json.dumps(value))
    return of_all(value, run._session.context.group)[0]


def replicas_of(replicas: int | None, accumulation: int) -> int | None:
    """Return the number of replicas with which to open a run: `replicas * accumulation`.

    If `replicas` is `None`, return `None`, so that each rank hosts one replica. `accumulation`: number of
    batches whose gradients are added up before a step; each is computed by a replica of its own.

    Raises:
        UsageError: if `accumulation` is above 1, but `replicas` is `None`.
    """
    if replicas is not None:
        return replicas * accumulation
    if accumulation > 1:
        raise UsageError(
            f"gradient_accumulation_steps={accumulation} without replicas; expected a number of "
            "replicas: a batch is accumulated from more replicas than there are ranks",
            hint="replicas=N, as many as processes are to be emulated",
        )
    return None


def refuse(option: str, instead: str) -> None:
    """Raise the error for a framework's `option` that a run does not support; the hint is `instead`.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        f"{option} was given; expected none: it makes the result depend on the layout, or trains by "
        "itself what the run trains",
        hint=instead,
    )
