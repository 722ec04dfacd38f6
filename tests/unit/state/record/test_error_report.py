"""How a worker describes its exception."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._utils import ExceptionWrapper

from lockstep.errors import LoaderError
from lockstep.state.record import error_report


def caught(error: Exception, *, worker: bool = False) -> Exception:
    """Return what a loop meets whose data raise `error` for one sample, in a DataLoader worker or not."""
    error.add_note("sample 2 of Images")
    try:
        try:
            raise error  # noqa: TRY301 - the traceback is what it is raised for
        except Exception:
            if worker:  # as torch brings it from there
                ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 0").reraise()
            raise
    except Exception as found:
        return found


def told(error: Exception) -> str:
    return error_report.describe(error, 0, None).message


def test_notes_stand_below_the_message() -> None:
    assert told(caught(OSError("x.jpg: truncated"))) == "x.jpg: truncated\n  sample 2 of Images"


@pytest.mark.parametrize("error", [OSError("x.jpg: truncated"), torch.OutOfMemoryError("of GPU 0")])
def test_an_error_in_a_loader_worker_is_told_without_its_traceback(error: Exception) -> None:
    said = f"{error}\n  sample 2 of Images\n  in DataLoader worker process 0"
    found = caught(error, worker=True)
    assert "Original Traceback" in str(found)
    assert told(found) == said


def test_what_a_loader_worker_raised_from_another_error_is_told_alone() -> None:
    error = LoaderError("no such image")
    error.__cause__ = OSError("disk")
    assert told(caught(error, worker=True)).startswith("no such image\n  sample 2 of Images")
