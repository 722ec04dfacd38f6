"""Cases beyond the rules' own examples: what is written in other ways, and what must not be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tools.check import editor, engine, fix
from lockstep.tools.check.config import Selection

HEAD = """\
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
"""

STEP = "for i, x in enumerate(d):\n    loss = f(x)\n    loss.backward()\n"

FOUND = {
    "the guard is in the caller": (
        "LS401",
        "def report():\n    dist.barrier()\n\nif rank == 0:\n    report()\n",
    ),
    "ranks leave before": (
        "LS401",
        "def f():\n    if rank != 0:\n        return\n    dist.barrier()\n",
    ),
    "a name stands for the comparison": (
        "LS401",
        "lead = rank == 0\nif lead:\n    dist.barrier()\n",
    ),
    "the set is known after a name change": (
        "LS204",
        "n = dist.get_world_size()\nb = 8 * n\nDataLoader(d, b, sampler=DistributedSampler(d))\n",
    ),
    "a method of a trainer saves": (
        "LS301",
        "class T:\n    def save(self):\n        torch.save(self.m, 'm')\n\nT().save()\n",
    ),
    "a helper is called in each step": (
        "LS402",
        (
            "def log(loss):\n    return loss.item()\n\nfor x in d:\n    loss = f(x)\n    loss.backward()\n"
            "    log(loss)\n"
        ),
    ),
    "a move before the first loop": (
        "LS304",
        "o = torch.optim.SGD(net.parameters())\nnet.cuda()\nfor x in d:\n    net(x).backward()\n",
    ),
    "a place to meet at": (
        "LS101",
        "dist.init_process_group('nccl', init_method='tcp://127.0.0.1:29500', rank=rank)\n",
    ),
    "spawned by a function that the module calls": (
        "LS108",
        (
            "import torch.multiprocessing as mp\n\ndef work(n):\n    pass\n\ndef main():\n"
            "    if 1 < 2:\n        mp.spawn(work, nprocs=2)\n\nmain()\n"
        ),
    ),
    "processes of a context": (
        "LS108",
        (
            "import multiprocessing\n\ncontext = multiprocessing.get_context('spawn')\n"
            "context.Process(target=print).start()\n"
        ),
    ),
    "processes by a start method": (
        "LS108",
        (
            "import torch.multiprocessing as mp\n\nmp.set_start_method('spawn')\n"
            "for n in range(2):\n    mp.Process(target=print).start()\n"
        ),
    ),
    "workers that are spawned": (
        "LS108",
        "DataLoader(d, num_workers=2, multiprocessing_context='spawn')\n",
    ),
    "a prepared loader, times the ranks": (
        "LS204",
        (
            "from accelerate import Accelerator\n\na = Accelerator()\n"
            "a.prepare(DataLoader(d, batch_size=8 * a.num_processes))\n"
        ),
    ),
    "a batch size by its name": (
        "LS216",
        "global_batch_size = 64\nDataLoader(d, global_batch_size, sampler=DistributedSampler(d))\n",
    ),
    "an archive that all ranks unpack": (
        "LS206",
        "import tarfile\n\ntarfile.open('data.tar').extractall('data')\n",
    ),
    "a split by the rank": (
        "LS210",
        (
            "from torch.utils.data import random_split\n\n"
            "g = torch.Generator().manual_seed(rank)\nrandom_split(d, [1, 1], generator=g)\n"
        ),
    ),
    "numbers of a set": ("LS207", "index = {c: i for i, c in enumerate(set(names))}\n"),
    "a set as a list, in a dataset": (
        "LS207",
        (
            "class D(torch.utils.data.Dataset):\n    def __init__(self, names):\n"
            "        self.names = list(set(names))\n"
        ),
    ),
    "an optimizer's own learning rate": ("LS215", "torch.optim.Adam(DDP(net).parameters())\n"),
    "a learning rate by an option": (
        "LS215",
        (
            "import argparse\n\np = argparse.ArgumentParser()\np.add_argument('--lr', default=0.1)\n"
            "args = p.parse_args()\ntorch.optim.SGD(DDP(net).parameters(), lr=args.lr)\n"
        ),
    ),
    "a tensor that is printed": ("LS402", f"{STEP}    print(f'loss {{loss}}')\n"),
    "a tensor beside a bar": ("LS402", f"{STEP}    bar.set_postfix(loss=loss)\n"),
    "a tensor as a number": ("LS402", f"{STEP}    total += float(loss)\n"),
    "rank 0 leaves the loop": (
        "LS407",
        f"net = DDP(net)\n{STEP}    if rank == 0 and i > 7:\n        break\n",
    ),
    "patience by an evaluation that is dealt out": (
        "LS407",
        (
            "net = DDP(net)\nval_sampler = DistributedSampler(val_set)\nfor e in range(9):\n"
            "    for x in d:\n        net(x).backward()\n    if waited > patience:\n        break\n"
        ),
    ),
    "layers that FSDP does not know": (
        "LS305",
        (
            "from torch.distributed.fsdp import fully_shard\n\nfully_shard(net)\n"
            "net = nn.SyncBatchNorm.convert_sync_batchnorm(net)\n"
        ),
    ),
    "the loop is two functions": (
        "LS403",
        (
            "def step(x):\n    net(x).backward()\n    dist.barrier()\n\ndef epoch():\n    for x in data:\n"
            "        step(x)\n\nepoch()\n"
        ),
    ),
}

SILENT = {
    "a device with its index": (
        "LS104",
        "device = torch.device('cuda', rank)\nmodel = DDP(nn.Linear(1, 1).to(device))\n",
    ),
    "an evaluation reads each batch's loss": (
        "LS402",
        (
            "def evaluate(net):\n    for x in d:\n        log(net(x).loss.item())\n\nfor x in d:\n"
            "    net(x).backward()\n    evaluate(net)\n"
        ),
    ),
    "the sampler of an attribute for evaluation": (
        "LS201",
        (
            "class T:\n    def f(s):\n        s.s = DistributedSampler(s.val)\n        for e in r:\n"
            "            for x in d:\n                net(x).backward()\n"
        ),
    ),
    "both branches call it": (
        "LS401",
        "if rank == 0:\n    dist.broadcast(a, 0)\nelse:\n    dist.broadcast(b, 0)\n",
    ),
    "others wait for the first": (
        "LS401",
        "def f():\n  if rank != 0:\n    dist.barrier()\n  load()\n  if rank == 0:\n    dist.barrier()\n",
    ),
    "whether there are ranks at all": ("LS401", "if rank != -1:\n    dist.barrier()\n"),
    "each branch of an expression calls it": (
        "LS401",
        "dist.gather(x, out) if rank == 0 else dist.gather(x)\n",
    ),
    "a move after the training": (
        "LS304",
        "o = torch.optim.SGD(net.parameters())\nfor x in d:\n    net(x).backward()\nnet.to('cpu')\n",
    ),
    "Fabric's guard": (
        "LS206",
        "with fabric.rank_zero_first():\n    data = MNIST('data', download=True)\n",
    ),
    "a barrier finds its device": ("LS103", "DDP(net.to(rank))\ndist.barrier()\n"),
    "objects over a group of its own": ("LS103", "dist.broadcast_object_list(o, group=gloo)\n"),
    "a group by its position": ("LS103", "dist.all_gather_object(out, o, gloo)\n"),
    "a group of its own": ("LS401", "if rank < 2:\n    dist.all_reduce(x, group=pair)\n"),
    "the trainer knows its rank by another name": (
        "LS301",
        (
            "class T:\n    def __init__(self, gpu):\n        self.gpu = gpu\n    def save(self):\n"
            "        if self.gpu == 0:\n            torch.save(self.m, 'm')\n\nT(rank).save()\n"
        ),
    ),
    "each rank has its file": ("LS301", "torch.save(x, f'part-{rank}.pt')\n"),
    "one of two wrappers": (
        "LS109",
        "if many:\n    model = DDP(net)\nelse:\n    model = nn.DataParallel(net)\n",
    ),
    "every hundredth step": (
        "LS402",
        (
            "for i, x in enumerate(data):\n    loss = net(x)\n    loss.backward()\n    if i % 100 == 0:\n"
            "        print(loss.item())\n"
        ),
    ),
    "the sampler may not be there": (
        "LS202",
        "s = DistributedSampler(d) if many else None\nDataLoader(d, sampler=s, shuffle=(s is None))\n",
    ),
    "set_epoch through the loader": (
        "LS201",
        (
            "loader = DataLoader(d, sampler=DistributedSampler(d))\nfor e in range(3):\n"
            "    loader.sampler.set_epoch(e)\n    for x in loader:\n        net(x).backward()\n"
        ),
    ),
    "scaled in one branch, plain in the other": (
        "LS406",
        (
            "def f(loss, a):\n    if a:\n        scaler.scale(loss).backward()\n        scaler.step(opt)\n"
            "        scaler.update()\n    else:\n        loss.backward()\n        opt.step()\n"
        ),
    ),
    "a port that is found": (
        "LS101",
        "dist.init_process_group('nccl', init_method=f'tcp://127.0.0.1:{port()}')\n",
    ),
    "spawned by a function under a guard": (
        "LS108",
        (
            "import torch.multiprocessing as mp\n\ndef work(n):\n    pass\n\ndef main():\n"
            "    mp.spawn(work, nprocs=2)\n\nif __name__ == '__main__':\n    main()\n"
        ),
    ),
    "forked processes": ("LS108", "import multiprocessing\n\nmultiprocessing.Process().start()\n"),
    "a global batch that is divided": (
        "LS216",
        (
            "total_batch_size = 64\nown = total_batch_size // dist.get_world_size()\n"
            "DataLoader(d, own, sampler=DistributedSampler(d))\n"
        ),
    ),
    "batches that Accelerate splits": (
        "LS204",
        (
            "from accelerate import Accelerator\n\na = Accelerator(split_batches=True)\n"
            "a.prepare(DataLoader(d, batch_size=8 * a.num_processes))\n"
        ),
    ),
    "an option that is divided": (
        "LS216",
        (
            "import argparse\n\np = argparse.ArgumentParser()\n"
            "p.add_argument('--batch', help='of all GPUs')\nargs = p.parse_args()\n"
            "args.batch = int(args.batch / n)\n"
            "DataLoader(d, args.batch, sampler=DistributedSampler(d))\n"
        ),
    ),
    "a directory of the process's own": ("LS301", "torch.save(x, os.path.join(tmp_path, 'm'))\n"),
    "parameters that an optimizer gets by hand": (
        "LS304",
        (
            "from torch.distributed.fsdp import fully_shard\n\no = torch.optim.SGD(net.parameters())\n"
            "fully_shard(net)\no.param_groups[0]['params'] = list(net.parameters())\n"
        ),
    ),
    "a wrapper that comes later, by a function": (
        "LS305",
        (
            "def wrap(m):\n    return DDP(m)\n\nnet = nn.SyncBatchNorm.convert_sync_batchnorm(net)\n"
            "net = wrap(net)\n"
        ),
    ),
    "wrappers under two conditions": (
        "LS109",
        "if one:\n    net = nn.DataParallel(net)\nif not one:\n    net = DDP(net)\n",
    ),
    "a test in one process": (
        "LS301",
        (
            "import unittest\n\nclass T(unittest.TestCase):\n    def test(self):\n"
            "        torch.save(1, 'm')\n"
        ),
    ),
    "the elements of a set in order": ("LS207", "list(enumerate(sorted(set(names))))\n"),
    "a number that is printed": (
        "LS402",
        "for x in d:\n    loss = float(f(x))\n    net(x).backward()\n    print(loss)\n",
    ),
    "ranks without a file to save leave the epoch": (
        "LS407",
        (
            "net = DDP(net)\nfor e in range(9):\n    for x in d:\n        net(x).backward()\n"
            "    if rank != 0:\n        continue\n    torch.save(net, 'm')\n"
        ),
    ),
    "an evaluation that every rank makes alike": (
        "LS407",
        (
            "net = DDP(net)\nfor e in range(9):\n    for x in d:\n        net(x).backward()\n"
            "    if waited > patience:\n        break\n"
        ),
    ),
    "a port only where none is given": (
        "LS101",
        "if 'MASTER_PORT' not in os.environ:\n    os.environ['MASTER_PORT'] = '29500'\n",
    ),
}


LOOP = """\
import lockstep
import numpy as np
import torch

with lockstep.Run("toy", replicas=2) as run:
    rng = np.random.default_rng(0)
    for x in run.loader(data, batch_size=4, num_workers=8 // run.world.size):
        {}
        run.backward(model(x))
        optimizer.step()
    run.print(run.world.size * 4)
"""
#: A line in the body of a Lockstep loop, and the rule that finds it.
LOOPS = [
    ("x = x + rng.normal()", ["LS609"]),
    ("x = x + np.random.default_rng(torch.initial_seed()).normal()", []),
    ("torch.manual_seed(run.world.rank)", ["LS608"]),
    ("x = x[run.world.rank :: run.world.size]", ["LS608"]),
    ("own = np.random.default_rng(torch.initial_seed())\n        x = x + own.normal()", []),
    ("run.log(x=x, rank=run.world.rank)", []),
    ("if run.step % 20 == 0: run.log(x=x)", []),
]


#: A script of a framework with an adapter of `lockstep.integrations`, and the rule that finds its fault.
ADAPTED = """
from transformers import TrainingArguments
from lockstep.integrations.transformers import Trainer
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

world_size = dist.get_world_size()
arguments = TrainingArguments("out", learning_rate={})
for x in DataLoader(data, shuffle=True):
    loss.backward()
Trainer(model, arguments).train()
"""


@pytest.mark.parametrize(("rate", "expected"), [("1e-3 * world_size", ["LS608"]), ("1e-3", [])])
def test_a_script_with_an_adapter(rate: str, expected: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ADAPTED.format(rate))
    outcome = engine.check([script])
    assert [one.code for one in outcome.findings] == expected
    assert not outcome.notes


@pytest.mark.parametrize(("line", "expected"), LOOPS)
def test_loops_of_lockstep(line: str, expected: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP.format(line))
    found = engine.check([script], Selection(select=("LS60",))).findings
    assert [one.code for one in found] == expected


def codes(tmp_path: Path, text: str, code: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + text)
    return [one.code for one in engine.check([script], Selection(select=(code,))).findings]


@pytest.mark.parametrize(("code", "text"), FOUND.values(), ids=FOUND)
def test_found(code: str, text: str, tmp_path: Path) -> None:
    assert codes(tmp_path, text, code) == [code]


@pytest.mark.parametrize(("code", "text"), SILENT.values(), ids=SILENT)
def test_silent(code: str, text: str, tmp_path: Path) -> None:
    assert codes(tmp_path, text, code) == []


@pytest.mark.parametrize(
    ("code", "text", "harm"),
    [
        ("LS408", "if rank == 0:\n        optimizer.step()", "corrupts"),
        ("LS408", "if rank == 0:\n        net(x).backward()", "hangs"),
        ("LS406", "scaler.scale(net(x)).backward()\n    scaler.step(optimizer)", "fails"),
        ("LS304", "pass\ndef f(n):\n    torch.optim.SGD(n.parameters())\n    n.to(0)", "misleads"),
    ],
)
def test_a_place_may_do_other_harm_than_its_rule(
    code: str, text: str, harm: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{HEAD}net = DDP(net)\nfor x in d:\n    net(x).backward()\n    {text}\n")
    found = engine.check([script], Selection(select=(code,))).findings
    assert [(one.code, one.harm) for one in found] == [(code, harm)]


def test_no_warning_at_exit_over_gloo(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = HEAD + "for x in d:\n    net(x).backward()\n"
    for backend, expected in (("nccl", ["LS107"]), ("gloo", [])):
        script.write_text(text.replace("nccl", backend))
        found = engine.check([script], Selection(select=("LS107",))).findings
        assert [one.code for one in found] == expected


@pytest.mark.parametrize(("devices", "expected"), [("1", []), ("2", ["LS206"])])
def test_fabric_on_one_device_is_one_process(
    devices: str, expected: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning import Fabric\nfrom torchvision.datasets import MNIST\n\n"
        f"fabric = Fabric(devices={devices})\nfabric.launch()\nMNIST('data', download=True)\n"
    )
    assert [one.code for one in engine.check([script]).findings] == expected


SAVE = "torch.save(net, 'm.pt')\n"
LISTS = "class A(torch.utils.data.Dataset):\n    def f(s):\n        "
#: Of a place that is found: the code, the script after its imports, whether it has an edit.
EDITS = {
    "the group is there": ("LS301", f"dist.init_process_group()\n{SAVE}", True),
    "a group in some runs": ("LS301", f"if many:\n    dist.init_process_group()\n{SAVE}", False),
    "a function that is called in some runs": (
        "LS301",
        f"def start():\n    dist.init_process_group()\n\nif many:\n    start()\n{SAVE}",
        False,
    ),
    "a function that returns early": (
        "LS301",
        (
            "def start():\n    if one:\n        return\n    dist.init_process_group()\n\n"
            f"start()\n{SAVE}"
        ),
        False,
    ),
    "functions in their order": (
        "LS301",
        (
            "def start():\n    dist.init_process_group()\n\n"
            "def end():\n    dist.destroy_process_group()\n\n"
            f"def save():\n    {SAVE}\ndef main():\n    start()\n    save()\n    end()\n\n"
            "if __name__ == '__main__':\n    main()\n"
        ),
        True,
    ),
    "a save after the end": (
        "LS301",
        f"dist.init_process_group()\ndist.destroy_process_group()\n{SAVE}",
        False,
    ),
    "a save after a function that ends the group": (
        "LS301",
        (
            "def train():\n    dist.init_process_group()\n    dist.destroy_process_group()\n\n"
            f"train()\n{SAVE}"
        ),
        False,
    ),
    "a wrapper in some runs": (
        "LS302",
        (
            "dist.init_process_group()\nif many:\n    net = DDP(net)\n"
            "torch.save(net.state_dict(), 'm')\n"
        ),
        False,
    ),
    "a wrapper by an expression": (
        "LS302",
        (
            "dist.init_process_group()\nnet = DDP(net) if many else net\n"
            "torch.save(net.state_dict(), 'm')\n"
        ),
        False,
    ),
    "wrapped and saved in one branch": (
        "LS302",
        (
            "dist.init_process_group()\nif many:\n    net = DDP(net)\n"
            "    torch.save(net.state_dict(), 'm')\n"
        ),
        True,
    ),
    "a listing": ("LS207", f"dist.init_process_group()\n{LISTS}s.f = os.listdir(a)\n", True),
    "entries": ("LS207", f"dist.init_process_group()\n{LISTS}s.f = os.scandir(a)\n", False),
    "an opened listing": (
        "LS207",
        f"dist.init_process_group()\n{LISTS}with root.glob(a) as e:\n            s.f = e\n",
        False,
    ),
}


@pytest.mark.parametrize(("code", "text", "edited"), EDITS.values(), ids=EDITS)
def test_an_edit_is_offered_where_it_breaks_nothing(
    code: str, text: str, edited: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD.replace('dist.init_process_group("nccl")\n', "") + text)
    found = engine.check([script], Selection(select=(code,))).findings
    assert [(one.code, one.fixable) for one in found] == [(code, edited)]


def test_calls_are_followed_into_the_projects_modules(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "import torch.distributed as dist\n\ndef wait():\n  dist.barrier()\n"
    )
    script = tmp_path / "train.py"
    script.write_text(HEAD + "import tools\n\nif rank == 0:\n    tools.wait()\n")
    found = engine.check([script, tmp_path / "tools.py"], Selection(select=("LS401",))).findings
    assert [(one.path.name, one.line) for one in found] == [("tools.py", 4)]


def test_a_fix_keeps_comments_and_columns_beyond_ascii(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    line = "grüße = 'ä'; loader = DataLoader(d, sampler=DistributedSampler(d), shuffle=True)  # ü\n"
    script.write_text(HEAD + line)
    outcome = engine.check([script], Selection(select=("LS202",)))
    module, edits = outcome.edits[script]
    assert editor.apply(module, edits) == HEAD + line.replace(", shuffle=True", "")


def test_a_diff_says_where_the_last_line_has_no_end() -> None:
    text = fix.diff(Path("a.py"), "x = 1\ny = 2", "x = 1\ny = 3\n")
    assert text.endswith("\n-y = 2\n\\ No newline at end of file\n+y = 3\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "call run.clip_grad_norm_"),
        ("if run.step % 20 == 0: print(evaluate(model, test))", "do it between the batches"),
        ("if run.step > 20: x = noisy(model, x)", None),
    ],
)
def test_calls_with_the_model(line: str, message: str | None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP.format(line).replace("    rng", "    model = run.model(net)\n    rng"))
    found = engine.check([script], Selection(select=("LS605",))).findings
    assert [message in one.message for one in found if message] == [True] * (message is not None)


@pytest.mark.parametrize(("call", "found"), [("loss.backward()", 1), ("run.backward(loss)", 0)])
def test_own_backward_passes_between_batches(call: str, found: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import lockstep\nwith lockstep.Run('toy', replicas=2) as run:\n"
        "    for whole in run.batches(run.loader(data, batch_size=4)):\n"
        f"        for x in whole:\n            loss = model(x)\n            {call}\n"
    )
    assert len(engine.check([script], Selection(select=("LS606",))).findings) == found


def test_an_optimizer_of_another_loop_is_none_of_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    other = "\n\ndef by_hand(model):\n    o = torch.optim.SGD(model.parameters())\n    o.step()\n"
    script.write_text(LOOP.format("pass") + other)
    assert engine.check([script], Selection(select=("LS603",))).findings == []


def test_a_fix_writes_what_stands_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + 'os.environ["MASTER_PORT"] = "29500"  # why\n')
    outcome = engine.check([script], Selection(select=("LS101",)))
    module, edits = outcome.edits[script]
    line = 'os.environ.setdefault("MASTER_PORT", "29500")  # why\n'
    assert editor.apply(module, edits) == HEAD + line


EPOCHS = """\
import lockstep

class EarlyStopping:
    def __init__(self):
        self.bad, self.limit = 0, 3

    def step(self, value):
        self.bad += 1
        return self.bad > 3

class Meter:
    def update(self, value):
        self.total += value
        self.average = self.total / 2

def main():
    with lockstep.Run("toy", replicas=2) as run:
        {before}
        for epoch in run.epochs(9):
            score = run.mean(measure())
            {inside}
        {after}

main()
"""
#: Code before the epochs, in each and after them, and the names that the rule finds.
KEPT = {
    "several first values": (
        "best, bad = float('inf'), 0",
        "if score < best: best, bad = score, 0",
        "",
        ["best"],
    ),
    "a count": ("bad = 0", "bad += 1\n            if bad > 3: break", "", ["bad"]),
    "a value read after the epochs": (
        "weights = None",
        "if score > 1: weights = copy(model)",
        "model.load_state_dict(weights)",
        ["weights"],
    ),
    "an object": ("early = EarlyStopping()", "if early.step(score): break", "", ["early"]),
    "an attribute of an object": (
        "early = EarlyStopping()",
        "early.step(score)\n            if early.bad > 3: break",
        "",
        ["early"],
    ),
    "a method that computes anew": (
        "meter = Meter()",
        "meter.update(score)\n            if meter.average > 3: break",
        "",
        [],
    ),
    "a maximum": (
        "best = 0.0",
        "better = score > best\n            best = max(best, score)\n            if better: run.save()",
        "",
        ["best"],
    ),
    "a branch that leaves": (
        "last = 0.0",
        "if epoch: last = score\n            else: continue\n            if last > 3: break",
        "",
        [],
    ),
    "a case of a match": (
        "best = 0.0",
        "match epoch:\n                case 1: best = score\n            if score > best: break",
        "",
        ["best"],
    ),
    "a value of both parts of a try": (
        "good = True",
        (
            "try: test()\n            except ValueError: good = False\n            else: good = True\n"
            "            if good: run.save()"
        ),
        "",
        [],
    ),
    "an attribute that stays": ("early = EarlyStopping()", "if score > early.limit: break", "", []),
    "an object of the run": (
        "early = run.register('early', EarlyStopping())",
        "if early.step(score): break",
        "",
        [],
    ),
    "a count of this epoch": (
        "bad = 0",
        "bad = 0\n            bad += 1\n            if bad > 3: break",
        "",
        [],
    ),
    "a value of this epoch": ("last = 0.0", "last = score", "print(last)", []),
    "only shown": ("count = 0", "count += 1\n            if count % 3 == 0: print(score)", "", []),
    "assigned anew": (
        "last = None",
        "if score > 1: last = score",
        "last = 0\n        print(last)",
        [],
    ),
}


@pytest.mark.parametrize(("before", "inside", "after", "names"), KEPT.values(), ids=KEPT)
def test_values_that_a_crash_loses(
    before: str, inside: str, after: str, names: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(EPOCHS.format(before=before, inside=inside, after=after))
    found = engine.check([script], Selection(select=("LS601",))).findings
    assert [one.message.split()[0] for one in found] == names
