"""Attest a run by a chain of hashes of its records, and check an attestation by partial replays."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from lockstep.errors import CheckFailedError, CheckpointError, UsageError
from lockstep.state.checkpoint import catalog
from lockstep.tools.replay.comparison import Comparison
from lockstep.tools.replay.recorded import RecordedRun
from lockstep.tools.replay.replaying import ReplayOptions, replay

#: Name of the file in a run directory.
NAME = "attestation.json"
FORMAT = 1
#: Number of parts into which the steps of a long run are divided.
_PARTS = 100


@dataclass(slots=True)
class AttestationResult:
    """Result of checking a run's attestation: signature, replayed steps, and the first difference."""

    signature: str | None  # what ssh-keygen says of it
    confirmed: list[str] = field(default_factory=list)  # names of the replayed parts
    difference: str | None = None  # the first thing that differs
    notes: list[str] = field(default_factory=list)


def attest(run: RecordedRun, key: Path | None) -> dict[str, Any]:
    """Return the attestation of a run: hashes of its records, signed with the SSH key at `key` if given.

    Raises:
        UsageError: if the run has not ended or has no step record.
        CheckFailedError: if a checkpoint is damaged, or `ssh-keygen` cannot sign.
    """
    if run.content.get("status") == "running" or not run.entries:
        raise UsageError(
            f"{run.directory} has not ended, or has no step record; expected both",
            hint="attest it at its end; --hash-every 0 records no steps",
        )
    links = dict(_links(run))
    signature = None if key is None else _ssh_keygen(["sign", "-q", "-f", str(key)], links)
    return {"format": FORMAT, "links": links, "signature": signature}


def _links(run: RecordedRun) -> Iterator[tuple[str, str]]:
    """Yield (name, hash) for each part of a run's records: `run.json`, steps and checkpoints.

    Each hash is the SHA-256 over the part and all parts before it.
    """
    digest = hashlib.sha256()
    for name, part in _parts(run):
        digest.update(hashlib.sha256(part.encode()).digest())
        yield name, digest.hexdigest()


def _parts(run: RecordedRun) -> Iterator[tuple[str, str]]:
    for name in ("identity", "provenance", "data", "digest"):
        yield name, json.dumps(run.content.get(name), sort_keys=True)
    length = math.ceil(run.last / _PARTS)
    parts: list[list[Any]] = [[] for _ in range(0, run.last, length)]
    for key, entry in sorted(run.entries.items()):
        parts[(key.step - 1) // length].append([*key, entry.value.hex(), entry.samples])
    for n, part in enumerate(parts):
        yield f"steps {n * length + 1} to {min((n + 1) * length, run.last)}", json.dumps(part)
    for path in reversed(catalog.paths(run.directory / catalog.DIRECTORY).values()):
        try:
            yield path.name, catalog.look(path).manifest.dumps()
        except CheckpointError as error:
            raise CheckFailedError(f"{path}: {error.message}", hint="restore it") from error


def check(
    file: Path, run: RecordedRun, segments: int, signers: Path | None, scratch: Path
) -> AttestationResult:
    """Check the attestation in `file`: compare the hashes of `run`, and replay some of its steps.

    `segments` is the number of parts of the steps to replay, chosen at random. They are replayed in the
    directory `scratch`. `signers` is a file of allowed signers, as for `ssh-keygen`. With `None` the
    signature may be by any key, or be missing.

    Raises:
        UsageError: if the file is no attestation.
        CheckFailedError: if the signature is missing or not by an allowed signer, or a record
            differs.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        links, signature = dict(content["links"]), content["signature"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is no attestation: {error!r}", hint="lockstep attest RUN_DIR"
        ) from error
    if signature is None and signers is not None:
        raise CheckFailedError(
            f"{file} is not signed; expected a signature", hint="leave out --signers"
        )
    result = AttestationResult(None if signature is None else _verify(links, signature, signers))
    own = dict(_links(run))
    for name in own | links:
        if own.get(name) != links.get(name):
            raise CheckFailedError(
                f"{name}: the record in {run.directory} is not the attested one",
                hint="restore the records, or do not trust them",
            )
    parts = [name for name in links if name.startswith("steps ")]
    chosen = random.SystemRandom().sample(parts, min(segments, len(parts)))
    for name in sorted(chosen, key=parts.index):
        _, first, _, last = name.split()
        asked = ReplayOptions(step=int(first), until=int(last))
        seen = Comparison(run, asked, replay(run, asked, scratch / first))
        result.notes += [note for note in seen.notes() if note not in result.notes]
        if not seen.same:
            result.difference = seen.difference or f"{name}: nothing to compare"
            break
        result.confirmed.append(name)
    return result


def _verify(links: dict[str, str], signature: str, signers: Path | None) -> str:
    """Verify the signature of `links` with `ssh-keygen`; return the message that it prints.

    `links` are the hashes of an attestation. `signers` is a file of allowed signers; with `None` any key is
    accepted. A rejected signature raises `CheckFailedError`.
    """
    with NamedTemporaryFile("w") as file:
        file.write(signature)
        file.flush()
        words = ["-s", file.name]
        if signers is None:
            return _ssh_keygen(["check-novalidate", *words], links).strip()
        words += ["-f", str(signers)]
        who = _ssh_keygen(["find-principals", *words], links).split("\n")[0]
        return _ssh_keygen(["verify", *words, "-I", who], links).strip()


def _ssh_keygen(words: list[str], links: dict[str, str]) -> str:
    command = ["ssh-keygen", "-Y", *words, "-n", "lockstep"]
    text = json.dumps([FORMAT, links])
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"ssh-keygen: {error.strerror}", hint="install OpenSSH") from error
    if done.returncode:
        raise CheckFailedError(
            f"ssh-keygen -Y {words[0]}: {(done.stderr or done.stdout).strip()}",
            hint="--key names a key of OpenSSH, --signers an allowed-signers file with the signer's key",
        )
    return done.stdout
