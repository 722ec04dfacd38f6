"""The simulated accelerator finds what it is for: waits that are missing."""

from __future__ import annotations

import pytest

from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

HEAD = """
import torch
assert not torch.sim.is_initialized(), "importing torch uses no device"
side = torch.Stream(device="sim:0")
main = torch.accelerator.current_stream()
"""
#: Programs that print 1 where all waits are there; the line with `# wait` is left out for the other half.
PROGRAMS = {
    "a stream that waits for another": """
x = torch.zeros(1000, device="sim"); torch.accelerator.synchronize()
with torch.sim.stream(side):
    x.add_(1)
main.wait_stream(side)  # wait
y = x.clone(); main.synchronize()
print(int(y.mean().item()))
""",
    "an event": """
x = torch.zeros(1000, device="sim"); torch.accelerator.synchronize()
with torch.sim.stream(side):
    x.add_(1)
    event = torch.Event(device="sim"); event.record()
main.wait_event(event)  # wait
y = x.clone(); main.synchronize()
print(int(y.mean().item()))
""",
    "a copy into pinned memory": """
x = torch.zeros(1000, device="sim"); torch.accelerator.synchronize()
x.add_(1)
host = torch.zeros(1000).pin_memory()
host.copy_(x, non_blocking=True)
torch.accelerator.synchronize()  # wait
print(int(host.mean().item()))
""",
    "pinned memory that is written again": """
host = torch.ones(1000).pin_memory()
x = torch.empty(1000, device="sim").copy_(host, non_blocking=True)
torch.accelerator.synchronize()  # wait
host.fill_(7)
print(int(x.mean().item()))
""",
    "record_stream": """
x = torch.ones(1000, device="sim"); y = torch.zeros(1000, device="sim"); torch.accelerator.synchronize()
with torch.sim.stream(side):
    y.copy_(x, non_blocking=True)
    x.record_stream(side)  # wait
del x
z = torch.full((1000,), 7.0, device="sim"); main.synchronize()
side.synchronize()
print(int(y.mean().item()))
""",
}


def run(lockstep: Lockstep, places: str, program: str, lazy: bool = True) -> str:
    """Run a program with `places` on PYTHONPATH; return its output, or its errors."""
    environ = {"PYTHONPATH": places, "SIM_LAZY": str(int(lazy))}
    done = lockstep.python(lockstep.script(HEAD + program), env=environ, timeout=120)
    return done.out.strip() or done.err


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_missing_wait_changes_the_result(lockstep, simulated, name: str) -> None:
    whole = PROGRAMS[name]
    lacking = "\n".join(line for line in whole.splitlines() if not line.endswith("# wait"))
    assert run(lockstep, simulated, whole) == "1"
    assert run(lockstep, simulated, whole, lazy=False) == "1"
    assert run(lockstep, simulated, lacking) not in ("", "1")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("torch.ones(3, device='sim') + torch.ones(3)", "two devices, sim:0 and cpu"),
        ("torch.ones(3, device='sim:0') + torch.ones(3, device='sim:1')", "sim:0 and sim:1"),
        ("torch.ones(3, device='sim:4')", "invalid device ordinal 4 of 4"),
        (
            "import os; torch.ones(3, device='sim'); os.fork() or torch.ones(3, device='sim')",
            "Cannot re-initialize sim in forked subprocess",
        ),
    ],
)
def test_mistakes_that_a_device_refuses(lockstep, simulated, program: str, said: str) -> None:
    assert said in run(lockstep, simulated, program)
