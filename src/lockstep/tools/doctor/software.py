"""Check that all nodes have the same versions of Python, PyTorch, CUDA and drivers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.tools.doctor.check import Facts, Finding, Level, NodeReports, Options, check, listed
from lockstep.world import host
from lockstep.world.rendezvous.membership_check import HINTS, differing_versions

_DRIVER = Path("/proc/driver/nvidia/version")
_NUMBER = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")


def _look(_: Options) -> Facts:
    import torch

    from lockstep.world import cuda

    more: dict[str, str] = {}
    if torch.version.cuda is not None:
        more["CUDA"] = torch.version.cuda
        more["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    if torch.distributed.is_nccl_available():
        more["NCCL"] = cuda.nccl_version()
    if torch.version.hip is not None:
        more["ROCm"] = torch.version.hip
    if _DRIVER.is_file() and (found := _NUMBER.search(_DRIVER.read_text())):
        more["NVIDIA driver"] = found[1]
    return {"bits": host.versions(), "more": more}


@check("versions", look=_look, seconds=20)
def versions(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on nodes whose versions differ from those of the first node."""
    answers = seen.of("versions")
    if not answers:
        return
    (first, expected), others = answers[0], answers[1:]
    fine = True
    for label, facts in others:
        text = differing_versions(label, facts["bits"], first, expected["bits"])
        if text is not None:
            fine = False
            yield Finding("failure", text, HINTS["versions"])
        for name in sorted({*facts["more"], *expected["more"]}):
            mine, its = facts["more"].get(name, "none"), expected["more"].get(name, "none")
            if mine != its:
                fine = False
                # Two versions of NCCL cannot connect; other differences may lead to other bits.
                level: Level = "failure" if name == "NCCL" else "warning"
                text = f"{label} has {name} {mine}, {first} has {its}; expected the same"
                yield Finding(level, text, "install the same on all nodes")
    if fine:
        known = ((label, {**facts["bits"], **facts["more"]}) for label, facts in answers)
        each = [(label, ", ".join(map(" ".join, found.items()))) for label, found in known]
        yield Finding("ok", listed(each, seen))
