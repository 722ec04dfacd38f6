"""Errors of an audit, which computes a microbatch twice: what differs, which variables changed, hints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.engine.training.audit_record import NO_LOSS
from lockstep.engine.training.observations import VariableChange
from lockstep.errors import AuditError, WrongRankError, listed

_OFF = "--audit off switches the audit off"
#: Note that is added to an exception which the script raises in an audit's extra pass.
IN_AUDIT = (
    "this was in an extra pass of the audit, which runs the loop's body once more on a microbatch: "
    f"{_OFF}"
)
#: How many names a message has.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """An audit's finding: two passes of the loop's body over one microbatch computed different values.

    Attributes:
        replica: replica of the microbatch.
        kinds: kinds of values that differ, of `audit_record.KINDS`.
        extra: loss of the pass that only the audit makes.
        own: loss of the pass that trains.
        changes: variables that the audit's pass has changed, and that the next pass reads.
        has_same_samples: whether the loader gave both passes the same samples.
    """

    replica: int
    step: int
    kinds: Sequence[str]
    extra: float
    own: float
    changes: Sequence[VariableChange]
    has_same_samples: bool

    @property
    def where(self) -> str:
        """Text that names the microbatch whose two passes differ, for messages."""
        return f"replica {self.replica} in step {self.step}"

    @property
    def what(self) -> str:
        """Text that names the kinds of values that differ and the losses of both passes, for messages."""
        extra, own = ("none" if value == NO_LOSS else value for value in (self.extra, self.own))
        losses = f"the loss was {extra} in an extra pass and {own} in its own"
        others = [kind for kind in self.kinds if kind != "losses"]
        if "losses" not in self.kinds:
            return f"the {' and the '.join(others)} differ (loss {self.own})"
        return losses + (f", and the {' and the '.join(others)} differ" if others else "")


def carried(finding: Finding, by: str, suspect: str = "") -> AuditError:
    """Return the error for an audit whose two passes over one microbatch gave different values.

    `finding`: the microbatch and the differences. `by`: text that names the ranks which computed the
    passes. `suspect`: text that names a rank which may compute wrongly; without it the message blames state
    that the loop's body keeps between passes.
    """
    changes = [f"{one.shown} from {one.before} to {one.after}" for one in finding.changes]
    named = listed(changes, _SHOWN)
    cause = f"the pass changed {named}"
    if not finding.has_same_samples:
        return AuditError(
            f"{finding.where}, {by}: the loader gave the two passes different samples, and "
            f"{finding.what}; expected the same samples on all ranks, and each time"
            + (f"; {cause}" if named else ""),
            hint="sort lists of files; seed generators of the dataset's own by constants, not by rank, "
            f"process or clock; read data that is the same on all machines; {_OFF}",
        )
    if not named:
        cause = (
            "no variable that the audit looks at changed: look at iterators, closures, caches, collate_fn "
            "and what earlier loops have computed from one rank's samples; or a processor computes wrongly"
        )
    also = "; if that does not matter to the loss, {} computes wrongly: the others agree"
    also = also.format(suspect) if suspect else ""
    return AuditError(
        f"{finding.where}, {by}: {finding.what}; expected the same bits, as a rank makes one pass of the "
        f"loop's body for each replica that it hosts; {cause}{also}",
        hint="count with run.step or run.batch_index; change what the next pass reads between the batches "
        f"of run.batches(…), or in a hook of optimizer.register_step_post_hook; {_OFF}",
    )


def changed(names: Sequence[str]) -> AuditError:
    """Return the error for a loop's body that itself changed the parameters or buffers `names`.

    Only optimizer steps may change parameters. Buffers are checked only in extra passes of audits.
    """
    return AuditError(
        f"the loop's body changed {listed(names, _SHOWN)} besides by optimizer.step; expected no other "
        "changes, as a rank makes one pass of the body for each replica that it hosts",
        hint="change them in a hook of optimizer.register_step_post_hook, which runs once per step on "
        f"every rank, or between the batches of run.batches(…); {_OFF}",
    )


def collectives(calls: int) -> AuditError:
    """Return the error for a loop's body that makes `calls` collective calls besides those of the run."""
    return AuditError(
        f"the loop's body made {calls} collective call(s) of torch.distributed in one microbatch; expected "
        "none: a rank that hosts several replicas would make more of them than others, which would wait",
        hint="run.mean, run.sum and run.gather after the loop, or between the batches of run.batches(…); "
        f"{_OFF}",
    )


def wrong_rank(finding: Finding, place: str, agreed: int, *, rank: int | None) -> AuditError:
    """Return the error for one rank that computes other values in audits than all other ranks.

    `place`: text that names the rank, its node and its device. `agreed`: number of the last step that
    audits have confirmed. `rank`: number of the rank; `None` if ranks compute unequal numbers of
    microbatches, so that the script may be the cause, too.
    """
    message = (
        f"{place} computes something else than the other ranks: {finding.where}: "
        f"{finding.what}; the other ranks agree"
    )
    hint = (
        f"test that machine's memory and processor; states are confirmed up to step {agreed}, and the run "
        f"continues from one of these; {_OFF}"
    )
    if rank is not None:
        return WrongRankError(message, hint=hint, rank=rank)
    counts = "look for what counts passes, of which ranks make unequal numbers; or "
    return AuditError(message, hint=counts + hint)
