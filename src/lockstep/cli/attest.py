"""`lockstep attest`: write a chain of hashes of a run's records, or check one by replays."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from lockstep.cli.parser import Parser
from lockstep.cli.several_launches import kept_directory
from lockstep.errors import OutputError, UsageError

HELP = "write a record of a run that others can check, or check one by replays"
USAGE = "[options] [RUN_DIR]"
EPILOG = """\
RUN_DIR/attestation.json has a chain of SHA-256 over identity, provenance, data, digest, step record and
checkpoints. --check compares the records with it, and computes random parts of the steps again, on one
process. That confirms equality on this kind of hardware, with these versions. Exit codes: 0 written or
confirmed, 1 the script failed, 2 usage, 3 not the same, or not the right signature.
"""
EXAMPLES = {
    "lockstep attest runs/train/20261122-103512 --key ~/.ssh/id_ed25519": "write and sign",
    "lockstep attest --check runs/train/20261122-103512/attestation.json --segments 5": "check",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep attest` to its parser."""
    add = parser.add_argument
    where = "the directory of the run (with --check by default that of FILE)"
    add("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help=where)
    add("--key", type=Path, metavar="KEY", help="sign with this SSH key")
    add("--check", type=Path, metavar="FILE", help="check the attestation in FILE")
    add("--segments", type=int, default=5, metavar="K", help="parts to replay (default: 5)")
    add("--signers", type=Path, metavar="FILE", help="allowed signers, as ssh-keygen reads them")
    add("--json", action="store_true", help="print the result of a check as JSON")


def handle(options: argparse.Namespace) -> int:
    """Write the attestation of a run, or check one; return the exit code, 3 if a check fails."""
    from lockstep.tools.replay.attest import NAME, attest, check
    from lockstep.tools.replay.recorded import RecordedRun

    if options.run_dir is None and options.check is None:
        raise UsageError("neither RUN_DIR nor --check is given; expected the directory of a run")
    if options.segments < 0:
        raise UsageError(f"--segments {options.segments}; expected a number of parts to replay")
    run = RecordedRun.of(options.run_dir or options.check.parent)
    if options.check is None:
        file, content = run.directory / NAME, attest(run, options.key)
        try:
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{file} cannot be written: {error.strerror}") from None
        print(f"{file}: {run.last} steps, {'not ' * (options.key is None)}signed")
        return 0
    with kept_directory(None, "attest") as directory:
        done = check(options.check, run, options.segments, options.signers, directory)
    same = done.difference is None
    if options.json:
        print(json.dumps({"same": same, **asdict(done)}))
        return 0 if same else 3
    for note in done.notes:
        print(f"lockstep: note: {note}", file=sys.stderr)
    print(f"signature: {done.signature or 'none'}\nrecords: as attested")
    print(f"replayed, with the same bits: {', '.join(done.confirmed) or 'nothing'}")
    where = ", on this hardware, with these versions" if done.confirmed else ", the records"
    print(f"same: yes{where}" if same else "same: no")
    if not same:
        print(f"first difference: {done.difference}")
    return 0 if same else 3
