"""Cases beyond the rules' own examples: what is written in other ways, and what must not be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.check import engine, fix
from lockstep.check.config import Selection

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
    "a port only where none is given": (
        "LS101",
        "if 'MASTER_PORT' not in os.environ:\n    os.environ['MASTER_PORT'] = '29500'\n",
    ),
}


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
    assert fix.apply(module, edits) == HEAD + line.replace(", shuffle=True", "")


def test_a_fix_writes_what_stands_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + 'os.environ["MASTER_PORT"] = "29500"  # why\n')
    outcome = engine.check([script], Selection(select=("LS101",)))
    module, edits = outcome.edits[script]
    line = 'os.environ.setdefault("MASTER_PORT", "29500")  # why\n'
    assert fix.apply(module, edits) == HEAD + line
