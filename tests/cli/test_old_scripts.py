"""Scripts older than `LOCAL_RANK`, or that start their own ranks: unchanged under `lockstep run`."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Done, Lockstep

pytestmark = pytest.mark.forked

DDP = Path(__file__).parents[2] / "examples" / "ddp_2020.py"
#: torch's own launcher may use more than the loopback interface; one thread makes sums comparable.
PLAIN = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def weights(lockstep: Lockstep, name: str) -> dict[str, list[object]]:
    import torch

    state = torch.load(lockstep.directory / name, weights_only=True)
    return {key: value.tolist() for key, value in state.items()}


#: Now and then, a script with a process group of its own dies so after its last line, under any launcher:
#: Gloo's threads outlive the interpreter (https://github.com/pytorch/pytorch/pull/179291).
GLOO_AT_EXIT = "terminate called without an active exception"


def finished(run: Callable[[], Done]) -> Done:
    """Run a script that makes its own process group, again if Gloo aborts it at its exit."""
    for _ in range(2):
        done = run()
        if GLOO_AT_EXIT not in done.err:
            return done
    return run()


@pytest.mark.ranks(2)
def test_a_script_of_2020_gives_the_weights_it_gave_under_its_own_launcher(lockstep):
    own = ("-m", "torch.distributed.launch", "--standalone", "--nproc_per_node=2")
    theirs = finished(lambda: lockstep.python(*own, str(DDP), "--save", "theirs.pt", env=PLAIN))
    assert theirs.code == 0, theirs.err
    ours = finished(lambda: lockstep("run", "-n", "2", str(DDP), "--save", "ours.pt", env=PLAIN))
    assert ours.code == 0, ours.err
    assert ours.out == theirs.out
    assert ours.err == "lockstep: ddp_2020.py takes --local_rank: each rank gets its own\n"
    assert weights(lockstep, "ours.pt") == weights(lockstep, "theirs.pt")

    # The spelling of 2020 alone, which torch's own launcher refuses since 2.0.
    text = DDP.read_text().replace('"--local_rank", "--local-rank"', '"--local_rank"')
    script = lockstep.script(text)
    old = finished(lambda: lockstep("run", "-n", "2", script, "--save", "old.pt", env=PLAIN))
    assert old.out == theirs.out
    assert weights(lockstep, "old.pt") == weights(lockstep, "theirs.pt")


LOCAL_RANK_ONLY = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("{}", type=int, default=-1)
parser.add_argument("rest", nargs="*")
args = parser.parse_args()
assert args.local_rank in (-1, int(os.environ["LOCAL_RANK"])), args
print(args.local_rank, args.rest)
"""


def seen(done: Done) -> set[str]:
    assert done.code == 0, done.err
    return {line.partition("] ")[2] for line in done.out.splitlines()}


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("spelling", "start"),
    [("--local_rank", "fork"), ("--local-rank", "spawn"), ("--local_rank", "exec")],
)
@pytest.mark.ranks(2)
def test_each_rank_gets_its_own(lockstep, spelling, start):
    script = lockstep.script(LOCAL_RANK_ONLY.format(spelling))
    done = lockstep("run", "-n", "2", "--tee", "3", "--start", start, script, "x")
    assert seen(done) == {"0 ['x']", "1 ['x']"}
    assert f"lockstep: train.py takes {spelling}: each rank gets its own\n" in done.err


@pytest.mark.ranks(2)
def test_a_module_gets_its_own_too_and_its_package_is_not_imported_for_it(lockstep):
    lockstep.script("import os; print('import', 'RANK' in os.environ)", "package/__init__.py")
    lockstep.script(LOCAL_RANK_ONLY.format("--local-rank"), "package/train.py")
    done = lockstep("run", "-n", "2", "--tee", "3", "-m", "package.train")
    assert seen(done) == {"import True", "0 []", "1 []"}
    assert "lockstep: package.train takes --local-rank: each rank gets its own" in done.err
    assert "import" not in re.sub(r"^\[rank .*$", "", done.out, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "args"), [(["--no-local-rank"], []), ([], ["--local_rank", "-1"])]
)
@pytest.mark.ranks(2)
def test_a_user_may_decide_otherwise(lockstep, flags, args):
    script = lockstep.script(LOCAL_RANK_ONLY.format("--local_rank"))
    done = lockstep("run", "-n", "2", "--tee", "3", *flags, script, *args)
    assert seen(done) == {"-1 []"}
    assert done.err == ""


@pytest.mark.ranks(2)
def test_an_option_in_a_library_is_not_seen_and_the_flag_is_for_that(lockstep):
    lockstep.script(LOCAL_RANK_ONLY.format("--local_rank"), "config.py")
    script = lockstep.script("import config")
    done = lockstep("run", "-n", "2", "--tee", "3", script)
    assert seen(done) == {"-1 []"}
    done = lockstep("run", "-n", "2", "--tee", "3", "--legacy-local_rank", script)
    assert seen(done) == {"0 []", "1 []"}
    assert done.err == ""


def test_dry_run_shows_the_option(lockstep):
    script = lockstep.script(LOCAL_RANK_ONLY.format("--local_rank"))
    done = lockstep("run", "-n", "2", "--dry-run", script, "x")
    assert "train.py --local_rank=1 x" in done.out
    assert done.err == "lockstep: train.py takes --local_rank: each rank gets its own\n"


@pytest.mark.ranks(2)
def test_the_option_is_no_part_of_a_runs_identity(lockstep):
    script = lockstep.script(
        "import argparse, lockstep\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--local_rank', type=int)\n"
        "parser.add_argument('--lr')\n"
        "args = parser.parse_args()\n"
        "with lockstep.Run('old') as run: assert args.local_rank == run.world.local_rank\n"
    )
    done = lockstep("run", "-n", "2", "--run-dir", "here", script, "--lr", "1")
    assert done.code == 0, done.err
    recorded = json.loads((lockstep.directory / "here" / "run.json").read_text())
    assert recorded["identity"]["arguments"] == ["--lr", "1"]


#: What HfArgumentParser does with a dataclass of arguments, and TrainingArguments with its local rank.
DATACLASS_PARSER = """
import argparse, dataclasses, os, torch, torch.distributed as dist

@dataclasses.dataclass
class Arguments:
    output_dir: str = "out"
    local_rank: int = dataclasses.field(default=-1, metadata={"help": "of this process"})

    def __post_init__(self):
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.local_rank))

def parse(kind):
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(kind):
        spellings = {f"--{field.name}": None, f"--{field.name.replace('_', '-')}": None}
        parser.add_argument(*spellings, type=type(field.default), default=field.default)
    return kind(**vars(parser.parse_args()))

args = parse(Arguments)
if args.local_rank != -1:
    dist.init_process_group("gloo")
    total = torch.tensor([float(args.local_rank)])
    dist.all_reduce(total)
    print(args.output_dir, args.local_rank, total.item(), dist.get_world_size())
    dist.destroy_process_group()
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("flags", [[], ["--legacy-local_rank"]])
@pytest.mark.ranks(2)
def test_a_parser_made_from_a_dataclass(lockstep, flags):
    script = lockstep.script(DATACLASS_PARSER)
    done = lockstep("run", "-n", "2", "--tee", "3", *flags, script, "--output-dir", "there")
    assert seen(done) == {"there 0 1.0 2", "there 1 1.0 2"}
    assert done.err == ""


TRAINER = """
import sys
sys.modules["torchvision"] = None  # where it is built for another torch, transformers fails with it
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 32), "labels": index % 2}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
net = Net()
trainer = Trainer(model=net, args=args, train_dataset=Numbers())
trainer.train()
if args.process_index == 0:
    torch.save(net.state_dict(), args.run_name)
print("place", args.local_process_index, args.process_index, args.world_size, trainer.state.global_step)
"""


@pytest.mark.wide
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
    reason="needs transformers and accelerate: not installed",
)
@pytest.mark.ranks(2)
def test_the_trainer_of_transformers(lockstep):
    script = lockstep.script(TRAINER)
    args = "--use_cpu True --num_train_epochs 1 --per_device_train_batch_size 8 --report_to none"
    words = [*f"{args} --save_strategy no --disable_tqdm True --run_name".split(), "ours.pt"]
    ours = lockstep("run", "-n", "2", "--tee", "3", script, *words, env=PLAIN, timeout=120)
    assert {line for line in seen(ours) if "place" in line} == {"place 0 0 2 2", "place 1 1 2 2"}
    own = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    theirs = lockstep.python(*own, script, *words[:-1], "theirs.pt", env=PLAIN, timeout=120)
    assert theirs.code == 0, theirs.err
    assert weights(lockstep, "ours.pt") == weights(lockstep, "theirs.pt")


SPAWNING = """
import os, socket, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size, port):
    torch.set_num_threads(1)
    {rendezvous}
    dist.init_process_group("gloo", {method}rank=rank, world_size=size)
    total = torch.ones(2) * (rank + 1)
    dist.all_reduce(total)
    if rank == 0:
        print("sum", total[0].item(), "of", dist.get_world_size())
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(work, args=(2, port), nprocs=2)
"""
METHODS = {
    "own": ("os.environ.update(MASTER_ADDR='localhost', MASTER_PORT=str(port))", ""),
    "tcp": ("method = f'tcp://127.0.0.1:{port}'", "init_method=method, "),
    "file": ("method = f'file://{os.getcwd()}/rendezvous'", "init_method=method, "),
}


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("rendezvous", "start"),
    [*((rendezvous, "fork") for rendezvous in METHODS), ("own", "exec")],
)
@pytest.mark.ranks(3)
def test_a_script_that_spawns_its_ranks(lockstep, rendezvous, start):
    how, method = METHODS[rendezvous]
    script = lockstep.script(SPAWNING.format(rendezvous=how, method=method))
    done = lockstep("run", "--start", start, script)
    assert (done.code, done.out, done.err) == (0, "sum 3.0 of 2\n", "")


@pytest.mark.ranks(2)
def test_spawning_on_each_of_several_ranks_is_warned_of(lockstep):
    lockstep.script("import torch.multiprocessing as mp\nif False: mp.spawn(print, nprocs=2)\n")
    done = lockstep("run", "-n", "2", "train.py")
    assert done.code == 0
    assert done.err == (
        "lockstep: train.py starts ranks of its own (line 2), and so may each rank of this launch; "
        "such a script runs with -n 1\n"
    )


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_ranks_that_a_lockstep_script_spawns(lockstep):
    script = lockstep.script(
        "import os, lockstep, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        "    os.environ.update(RANK=str(rank), WORLD_SIZE='2')\n"
        "    with lockstep.Run('small', threads=1) as run:\n"
        "        w = run.world\n"
        # In one piece: two ranks write to one pipe.
        "        line = f'place {w.rank} {w.local_rank} {w.local_size}' + chr(10)\n"
        "        os.write(1, line.encode())\n"
        "if __name__ == '__main__': mp.spawn(work, nprocs=2)\n"
    )
    done = lockstep("run", script)
    assert done.code == 0, done.err
    places = [line for line in done.out.splitlines() if line.startswith("place")]
    assert sorted(places) == ["place 0 0 2", "place 1 1 2"]


@pytest.mark.ranks(1)
def test_a_lone_rank_makes_process_groups_again_and_again(lockstep):
    script = lockstep.script(
        "import os, torch, torch.distributed as dist\n"
        "for method in (None, 'env://', f'tcp://127.0.0.1:{os.environ[\"MASTER_PORT\"]}'):\n"
        "    rank = {} if method in (None, 'env://') else {'rank': 0, 'world_size': 1}\n"
        "    dist.init_process_group('gloo', init_method=method, **rank)\n"
        "    dist.barrier()\n"
        "    print(dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_RANK'])\n"
        "    dist.destroy_process_group()\n"
    )
    done = lockstep("run", script)
    assert (done.code, done.out, done.err) == (0, "0 1 0\n" * 3, "")


@pytest.mark.ranks(1)
def test_data_parallel_of_one_process(lockstep):
    script = lockstep.script(
        "import torch\n"
        "model = torch.nn.DataParallel(torch.nn.Linear(4, 2))\n"
        "if torch.cuda.is_available(): model.cuda()\n"
        "print(tuple(model(torch.ones(6, 4)).shape), type(model.module).__name__)\n"
    )
    done = lockstep("run", "--devices", "cpu", script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (done.code, done.out) == (0, "(6, 2) Linear\n")
