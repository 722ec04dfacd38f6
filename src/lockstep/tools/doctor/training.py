"""Check that devices compute the right bits, and that devices of one kind compute equal bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lockstep.tools.doctor.check import Facts, Finding, NodeReports, Options, check
from lockstep.world.devices import make_deterministic
from lockstep.world.host import processor

_ADVICE = (
    "take it out: look for machine checks (journalctl -k), test its memory (memtester); a library that "
    "replaces PyTorch's kernels does the same"
)


def _look(_: Options) -> Facts:
    import torch

    from lockstep.tools.doctor.arithmetic import exact_digest, ordinary_digest
    from lockstep.world import accelerator

    torch.set_num_threads(1)
    devices = ["cpu", *(f"{accelerator.kind()}:{index}" for index in range(accelerator.count()))]
    facts = {}
    for device in devices:
        make_deterministic(torch.device(device))
        facts[device] = {
            # Results have the same bits only on one kind of hardware.
            "kind": f"{processor()} ({torch.backends.cpu.get_cpu_capability()})"
            if device == "cpu"
            else str(accelerator.name(torch.device(device))),
            "exact": exact_digest(device),
            "twice": [ordinary_digest(device) for _ in range(2)],
        }
    return facts


@check("training", look=_look, seconds=20)
def training(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on devices whose bits are wrong, or differ between devices of the same kind."""
    from lockstep.tools.doctor.arithmetic import EXACT

    known = {
        (label, device): result
        for label, facts in seen.of("training")
        for device, result in facts.items()
    }
    good = {}
    for (label, device), result in known.items():
        where = f"{seen.on(label)}{device}"
        first, second = result["twice"]
        if result["exact"] != EXACT:
            text = f"{where} computes wrong bits: ten exact steps give {_short(result['exact'])}"
            yield Finding("failure", f"{text}; expected {_short(EXACT)}", _ADVICE)
        elif first != second:
            text = f"{where} computes other bits each time: {_short(first)}, then {_short(second)}"
            yield Finding("failure", f"{text}; expected the same", _ADVICE)
        else:
            good[label, device] = result
    yield from _compare(seen, good)


def _compare(seen: NodeReports, good: dict[tuple[str, str], Facts]) -> Iterator[Finding]:
    """Compare the digests of a short training between devices of one kind; yield the findings.

    `seen`: reports of the nodes, with their versions. `good`: results of the devices that passed the exact
    training, by node and device.
    """
    versions = dict(seen.of("versions"))
    kinds: dict[tuple[str, str], dict[str, str]] = {}
    for (label, device), result in good.items():
        of = (result["kind"], str(versions.get(label, {}).get("bits")))
        kinds.setdefault(of, {})[f"{seen.on(label)}{device}"] = result["twice"][0]
    fine: dict[str, list[str]] = {}
    for (kind, _), digests in kinds.items():
        (most, often), *others = Counter(digests.values()).most_common()
        if not others:
            fine.setdefault(most, []).append(f"{', '.join(digests)} ({kind})")
        elif often > others[0][1]:
            for where, other in digests.items():
                if other != most:
                    text = f"{where} computes other bits than the others: {_short(other)}"
                    yield Finding("failure", f"{text}; expected {_short(most)}", _ADVICE)
        else:
            each = ", ".join(f"{place}: {_short(one)}" for place, one in digests.items())
            text = f"{each}; expected the same on {kind}: one of them computes wrong bits"
            yield Finding("failure", text, _ADVICE)
    each = "; ".join(f"{_short(one)} on {', '.join(places)}" for one, places in fine.items())
    if len(fine) > 1:
        text = f"unlike devices or versions compute other bits: {each}"
        yield Finding("warning", text, "train on one kind, with one set of versions")
    elif fine:
        yield Finding("ok", f"ten steps, twice: {each}")


def _short(digest: str) -> str:
    return digest[: len("sha256:") + 12]
