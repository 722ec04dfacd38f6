"""`lockstep convert`: what becomes of whole scripts, of single lines, and of what cannot be converted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.errors import UsageError
from lockstep.tools.check import engine
from lockstep.tools.check.config import Selection
from lockstep.tools.check.engine import QUESTION
from lockstep.tools.convert import questions
from lockstep.tools.convert.script import convert
from tests import converted

#: A training that the tests of single lines put their lines into.
LOOP = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

{before}
loader = DataLoader(list(range(8)), batch_size=4)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for step, x in enumerate(loader):
        loss = model(x).mean()
        loss.backward()
        {inside}
        optimizer.step()
{after}
"""

#: A class that trains, and that nothing makes.
UNCALLED = """\
import torch
class Trainer:
    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters())
    def fit(self, data):
        for x in data:
            self.model(x).backward()
"""

#: An average of a model, by a class of the script's own.
AVERAGE = """\
class Mean:
    def update(self, model): ...
    def state_dict(self): ...
mean = Mean()"""
SCALER = "scaler = torch.amp.GradScaler()"
WEIGHTED = "nn.functional.cross_entropy(model(x), x, weight=w)"

#: The head of a DDP script.
DDP = "import torch.distributed as dist\ndist.init_process_group('gloo')"


def script(tmp_path: Path, before: str = "", inside: str = "pass", after: str = "") -> Path:
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(before=before, inside=inside, after=after))
    return path


@pytest.mark.parametrize("name", converted.NAMES)
def test_scripts(name: str) -> None:
    made = converted.made(name)
    assert converted.diff(name) == converted.expected(name).read_text(), "python -m tests.converted"
    assert len(made.questions) == converted.NAMES[name]
    lines = made.text.splitlines()
    for question in made.questions:
        assert lines[question.after - 1].strip() == QUESTION + question.text


def test_the_straight_script_changes_ten_lines_at_most() -> None:
    assert converted.made("straight").changed <= 10


def test_a_converted_script_has_nothing_that_corrupts(tmp_path: Path) -> None:
    for name in (name for name, left in converted.NAMES.items() if not left):
        (tmp_path / f"{name}.py").write_text(converted.made(name).text)
    paths = engine.files([tmp_path])
    assert engine.check(paths, Selection(("LS603", "LS606", "LS607"))).findings == []


def test_the_manual_shows_the_conversion_of_now() -> None:
    page = converted.PAGE.read_text()
    assert converted.written(page) == page, "python -m tests.converted writes it anew"


def test_the_manual_has_every_question() -> None:
    page = converted.PAGE.read_text()
    for name, text in vars(questions).items():
        if name.isupper() and name not in ("ACCUMULATED", "NORMALISED", "PER_RANK"):
            assert re.sub(r"\{\d\}", "…", text.partition(":")[0]) in page, name


@pytest.mark.parametrize(
    ("before", "inside", "after", "line"),
    [
        ("torch.manual_seed(3)", "pass", "", "seed=3"),
        ("torch.manual_seed(3); y = 4; torch.manual_seed(3)", "pass", "", "    y = 4"),
        ("run = 1", "pass", "", "as lockstep_run:"),
        ("", "pass", "torch.save(model.state_dict(), 'a.pt')", "run.export('a.pt', model)"),
        ("", "pass", "torch.save([model], 'a.pt')", "    if run.is_main_process:"),
        ("", "nn.utils.clip_grad_value_(model.parameters(), 1)", "", "run.clip_grad_value_("),
        (f"{DDP}\nlr = 0.1 * dist.get_world_size()", "pass", "", "    lr = 0.1 * run.replicas"),
        (
            f"{DDP}\nif dist.get_rank() == 0: print()",
            "pass",
            "",
            "    if run.is_main_process: print()",
        ),
        (f"{DDP}\npart = x[dist.get_rank() :: 2]", "pass", "", QUESTION + questions.PART),
        (f"{DDP}\nn = dist.get_world_size()\nprint(n)", "pass", "", "    n = run.replicas"),
        ("device = 'cuda:0'", "pass", "", 'device = "cuda"'),
        ("ä = 'ö' # ü", "pass", "ö = 1; ü = 2", "    ö = 1; ü = 2"),
        ("", "if step == 3: break", "", f"        {QUESTION}{questions.LEAVES}"),
        ("import sys", "if step == 3: sys.exit()", "", QUESTION + questions.LEAVES),
        ("", "if step == 3: raise SystemExit", "", QUESTION + questions.LEAVES),
        ("", "pass", "torch.save(model.state_dict(), 'a.tar')", "    if run.is_main_process:"),
        (AVERAGE, "pass", "torch.save(mean.state_dict(), 'a.pt')", "    if run.is_main_process:"),
        ("", "pass", "if loader: torch.save([model], 'a')", "        if run.is_main_process:"),
        ("", "pass", "x = 1; torch.save([model], 'a')", "        torch.save([model], 'a')"),
        ("", "pass", "with open('a', 'w') as f: f.write('')", QUESTION + questions.SAVE),
        ("", "pass", "import os; os.remove('a')", QUESTION + questions.SAVE),
        (SCALER, "scaler.update(new_scale=2.0)", "", QUESTION + questions.SCALER),
        (SCALER.replace("()", "(init_scale=2.0)"), "pass", "", QUESTION + questions.SCALER),
        ("", "mean.update(model)", AVERAGE, "LS605"),
        ("hidden = 0", "hidden = loss + hidden", "", "run.backward(loss)"),
        ("# above\ntorch.manual_seed(3)  # beside", "pass", "", "    # above\n    # beside\n"),
        (
            f"{DDP}\nfor k in range(dist.get_rank(), 8, 2): pass",
            "pass",
            "",
            QUESTION + questions.PART,
        ),
        (
            f"{DDP}\nmine = [k for k in x if k % dist.get_world_size() == 1]",
            "pass",
            "",
            QUESTION + questions.PART,
        ),
        (f"{DDP}\ns = 3 + dist.get_rank()\ntorch.manual_seed(s)", "pass", "", "seed=3, replicas=4"),
        (f"{DDP}\nrandom.seed(3 + dist.get_rank())", "pass", "", QUESTION + questions.RANK),
        (
            f"{DDP}\ndef test(x):\n    dist.all_reduce(x)\n    return x / dist.get_world_size()",
            "pass",
            "",
            QUESTION + questions.DIVIDED,
        ),
        (
            f"{DDP}\nn = dist.get_world_size()\ndist.all_reduce(x)\nprint(x / n)",
            "pass",
            "",
            QUESTION + questions.DIVIDED,
        ),
        (f"{DDP}\nn = 1 if dist.is_initialized() else 0", "pass", "", "n = 1 if True else 0"),
        (f"{DDP}\nimport os\nn = 'RANK' in os.environ", "pass", "", "n = True"),
        (f"{DDP}\nimport os\nn = int('RANK' in os.environ)", "pass", "", "n = int(True)"),
        (
            f"{DDP}\np.add_argument('--local_rank')\nprint(args.local_rank)",
            "pass",
            "",
            "print(run.world.local_rank)",
        ),
        (
            "",
            "if step % 2 == 1:\n            optimizer.step()",
            "",
            f"        {QUESTION}{questions.EVERY}",
        ),
    ],
)
def test_single_lines(tmp_path: Path, before: str, inside: str, after: str, line: str) -> None:
    text = convert(script(tmp_path, before, inside, after)).text
    assert line in text, text


#: Lines of a training, what is put in their place, and the question that is asked, if one is.
@pytest.mark.parametrize(
    ("old", "new", "question"),
    [
        ("model.parameters()", "things()", questions.PARAMETERS),
        ("range(2)", "[0, 1]", questions.EPOCHS),
        (
            "optimizer.step()\n",
            "optimizer.step()\nfor p in model.parameters(): p.requires_grad = False\n",
            questions.FROZEN,
        ),
        ("pass", "model.requires_grad_(False)", questions.FROZEN),
        ("DataLoader(list(range(8)), batch_size=4)", "load()", questions.LOADER.format("load()")),
        ("batch_size=4", "batch_sampler=s", None),
        ("backward()", "backward(retain_graph=True)", questions.BACKWARD),
        ("pass", "optimizer.param_groups[0]['lr'] = 1 / (step + 1)", questions.RATE),
        ("pass", "s = torch.optim.lr_scheduler.StepLR(optimizer, 1); s.step(step)", questions.RATE),
        ("optimizer.step()\n", "optimizer.step()\n    schedule.step(loss.item())\n", questions.OWN),
        ("optimizer.step()\n", "optimizer.step()\n    if loss < 1: break\n", questions.OWN),
        (
            "optimizer.step()\n",
            "optimizer.step()\n        torch.relu(x)\n    if torch.relu(w).item() < 1: break\n",
            None,
        ),
        ("range(2)", "range(state['epoch'], 2)", questions.START),
        ("pass", "optimizer.param_groups[0]['lr'] *= 0.9", questions.RATE),
        ("pass", "noise.step()", questions.OPTIMIZER.format("noise")),
        ("enumerate(loader)", "enumerate(islice(loader, 3))", questions.LEAVES),
        ("pass", "y = next(others)", questions.LOADER.format("next(others)")),
        ("model(x).mean()", "(model(x) * step).mean()", questions.CARRIED.format("step")),
        ("pass", "h = loss + h", None),
        ("loss = m", "x = {k: v for k, v in x.items()}\n        loss = m", None),
        ("model(x).mean()", f"{WEIGHTED} / 2", questions.WEIGHT),
        (".mean()", ".sum()", questions.SUMS),
        (".mean()", ".sum() / 4", questions.SUMS),
        (".mean()", ".sum() / len(x)", None),
        (".mean()", ".sum() / mask.sum()", questions.WEIGHT),
    ],
)
def test_questions(tmp_path: Path, old: str, new: str, question: str | None) -> None:
    path = script(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    made = convert(path)
    assert [one.text for one in made.questions] == ([question] if question else [])
    assert made.text.count(QUESTION) == len(made.questions)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("range(2)", "range(1, 2 if a else 3)", "run.epochs((2 if a else 3) - 1)"),
        ("range(2)", "range(1, 3)", "in run.epochs(3 - 1):\n        for step, x"),
        ("range(2):", "range(1, 3):\n    print(epoch)", "run.epochs(3 - 1):\n        epoch += 1\n"),
        ("range(2)", "tqdm(range(2))", "in tqdm(run.epochs(2), total=2):"),
        ("range(2)", "trange(1, n + 1, leave=False)", "tqdm(run.epochs(n), total=n, leave=False)"),
        ("enumerate(loader)", "enumerate(() if a else tqdm(loader))", "run.loader(DataLoader("),
        (".backward()", "\n        (loss * 2).backward()", "run.backward(loss * 2)"),
        ("model = nn", "for net in ():\n    pass\nmodel = nn", "run.model(nn.Linear(1, 1))"),
    ],
)
def test_other_forms(tmp_path: Path, old: str, new: str, line: str) -> None:
    path = script(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    text = convert(path).text
    assert line in text, text


def test_a_load_waits_for_a_file_that_was_saved(tmp_path: Path) -> None:
    saved = "if loss < 1: torch.save(model.state_dict(), 'best.pt')"
    loaded = "model.load_state_dict(torch.load('best.pt'))\nother = torch.load('other.pt')"
    text = convert(script(tmp_path, "torch.load('best.pt')", saved, loaded)).text
    assert text.count("run.barrier()") == 1
    assert "    run.barrier()\n    model.load_state_dict(torch.load('best.pt'))\n" in text


def test_a_batch_sampler_of_a_rank_is_a_question(tmp_path: Path) -> None:
    path = script(tmp_path, DDP)
    path.write_text(path.read_text().replace("batch_size=4", "batch_sampler=s"))
    assert questions.BATCH_SAMPLER in [one.text for one in convert(path).questions]


def test_a_mean_of_losses_over_batches_is_noted(tmp_path: Path) -> None:
    shown = (
        "print(total / len(loader), (total / len(loader.dataset)), total / 8, other / len(loader))"
    )
    path = script(tmp_path, "total = other = 0.0", "total += loss.item()", shown)
    notes = convert(path).notes
    assert [note.partition(" adds up ")[0] for note in notes] == [
        "total / len(loader) in line 15",
        "total / len(loader.dataset) in line 15",
    ]
    added = "total, n = total + loss.item() * len(x), n + len(x)"
    path = script(tmp_path, "total, n = 0.0, 0", added, "print(total / n, n / total, other / n)")
    notes = [note.partition(" adds up ")[0] for note in convert(path).notes]
    assert notes == ["total / n in line 15", "n / total in line 15"]


def test_what_nothing_needs_any_more_goes(tmp_path: Path) -> None:
    ranks = "n = dist.get_world_size()\ndef setup():\n    dist.barrier()\n"
    cleared = "def clean():\n    dist.destroy_process_group()\n"
    text = convert(script(tmp_path, f"{DDP}\n{ranks}{cleared}", after="clean()")).text
    assert "def setup" in text
    for gone in ("dist", "clean", "n = "):
        assert gone not in text, text


def test_line_ends_and_encodings_stay(tmp_path: Path) -> None:
    path = script(tmp_path, "name = 'ö'")
    text = "# -*- coding: latin-1 -*-\n" + path.read_text()
    path.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    out = tmp_path / "out.py"
    assert main(["convert", str(path), "-o", str(out)]) == 0
    written = out.read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n")
    assert "'ö'".encode("latin-1") in written


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from transformers import (\n    A,\n    Trainer,\n    TrainerCallback,\n)\nTrainer(A)",
            (
                "from transformers import (\n    A,\n    TrainerCallback,\n)\n"
                "from lockstep.integrations.transformers import Trainer\nTrainer(A)"
            ),
        ),
        (
            "def f():\n    from transformers import Trainer as T, TrainerCallback\n    T()",
            (
                "def f():\n    from transformers import TrainerCallback\n"
                "    from lockstep.integrations.transformers import Trainer as T\n    T()"
            ),
        ),
        (
            "from accelerate import Accelerator\nAccelerator()",
            "from lockstep.integrations.accelerate import Accelerator\nAccelerator()",
        ),
        (
            'import lightning as L\nL.Trainer(max_epochs=2, devices=4, strategy="ddp", num_nodes=2)',
            (
                "import lightning as L\nfrom lockstep.integrations.lightning import LockstepStrategy\n"
                "L.Trainer(max_epochs=2, strategy=LockstepStrategy())"
            ),
        ),
        (
            "from lightning.fabric import Fabric\ndef f():\n    return Fabric(devices=2)",
            (
                "from lightning.fabric import Fabric\n"
                "from lockstep.integrations.lightning import LockstepStrategy\n"
                "def f():\n    return Fabric(strategy=LockstepStrategy())"
            ),
        ),
    ],
)
def test_a_script_of_a_framework_changes_its_import(
    tmp_path: Path, before: str, after: str
) -> None:
    (tmp_path / "a.py").write_text(before)
    made = convert(tmp_path / "a.py")
    assert made.text == after
    assert "--replicas N" in made.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "x = (\n", r"a\.py:1:5: .*not valid Python 3"),
        ("a.py", "import torch\nprint 'old'\n", r"a\.py:2:1: .*not valid Python 3"),
        ("a.py", "x = 1\n", "no training loop found; looked for a for or while loop"),
        ("a.ipynb", "{}", "is a notebook"),
        ("a.py", "import lockstep\nlockstep.Run('a')\n", "is a Lockstep script already"),
        ("a.py", "import accelerate\naccelerate.Accelerator()\n", "by the module's name"),
        ("a.py", "from trl import SFTTrainer as T\nT()\n", "SFTTrainer of trl"),
        ("a.py", "from lockstep.integrations.accelerate import Accelerator\n", "already"),
        (
            "a.py",
            "import lightning as L\nL.Trainer(strategy='fsdp')\n",
            "a.py:2: strategy='fsdp' was",
        ),
        ("a.py", "import lightning as L\nL.Fabric('cpu', 'ddp')\n", "has arguments without names"),
        ("a.py", "from lightning.pytorch.cli import LightningCLI as C\nC()\n", "stays as it is"),
        ("a.py", "import pytorch_lightning as pl\npl.Trainer()\n", "expected lightning"),
        ("a.py", UNCALLED, "nothing that calls it"),
        ("b.py", "", "the training loop is in .*, which"),
        ("none.py", None, "is not there"),
    ],
)
def test_what_cannot_be_converted(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    (tmp_path / "loop.py").write_text("def f(y):\n for x in y:\n  x.backward()\n")
    if text is not None:
        (tmp_path / name).write_text(text or "from loop import f\nf([])\n")
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / name)


def test_a_line_that_only_python_parses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.py: LibCST, .*: error at \d+:8"):
        convert(script(tmp_path, "(size): int = 1"))


def test_where_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = script(tmp_path), tmp_path / "out.py"
    assert main(["convert", str(path)]) == 0
    shown = capsys.readouterr()
    assert f"--- {path}\n+++ {path}\n" in shown.out
    assert "+import lockstep" in shown.out
    assert "lines would change (-o OUT writes them), no questions left" in shown.err
    assert main(["convert", str(path), "-o", "-"]) == 0
    text, summary = capsys.readouterr()
    assert "lines changed, no questions left" in summary
    assert main(["convert", str(path), "-o", str(out)]) == 0
    assert out.read_text() == text == convert(path).text
    before = path.read_text()
    assert main(["convert", str(path), "-o", str(path)]) == 2
    assert path.read_text() == before
    assert "--force overwrites it" in capsys.readouterr().err
    assert main(["convert", str(path), "-o", str(path), "--force"]) == 0
    assert path.read_text() == text
    assert main(["convert", str(path)]) == 2
    assert main(["convert", str(script(tmp_path)), "-o", str(tmp_path / "no/a.py")]) == 1


def test_questions_are_listed_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = script(tmp_path, inside="if step: break"), tmp_path / "out.py"
    assert main(["convert", str(path)]) == 1
    line = path.read_text().splitlines().index("        if step: break") + 1
    assert f"{path}:{line}: question: {questions.LEAVES}\n" in capsys.readouterr().err
    assert main(["convert", str(path), "-o", str(out)]) == 1
    ((number,),) = [re.findall(r":(\d+): question", capsys.readouterr().err)]
    assert out.read_text().splitlines()[int(number) - 1].strip().startswith(QUESTION)


#: Trainings that look like others, and are none: what is left of a step loop's body, and the question.
UNLIKE = {
    "a scheduler each second batch": (
        "(loss / 2).backward()\nopt.step()\nopt.zero_grad()\nif i % 2 == 0:\n    sched.step()",
        questions.EVERY,
    ),
    "a gradient that is not divided": (
        "loss.backward()\nif (i + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()",
        questions.EVERY,
    ),
    "a condition of another form": (
        "(loss / 2).backward()\nif not (i + 1) % 2:\n    opt.step()\n    opt.zero_grad()",
        questions.EVERY,
    ),
    "one name for two losses": (
        "loss = model(x).mean()\nloss.backward()\nloss = model(x).std()\nloss.backward()\nopt.step()",
        questions.BACKWARD,
    ),
    "a gradient of backward": (
        "a = model(x).mean()\nb = model(x).std()\na.backward(one)\nb.backward(two)\nopt.step()",
        questions.BACKWARD,
    ),
    "a division that is only shown": (
        "y = loss.item() / 2\nloss.backward()\nif (i + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()",
        questions.EVERY,
    ),
    "a part of the loss is divided": (
        "(loss / 2 + x.mean()).backward()\nif (i + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()",
        questions.EVERY,
    ),
    "a condition beside the number": (
        "(loss / 2).backward()\nif (i + 1) % 2 == 0 or loss < 1:\n    opt.step()\n    opt.zero_grad()",
        questions.EVERY,
    ),
    "a name of the first update that some batches bind": (
        "if i % 2:\n    kept = x\nloss.backward()\nopt.step()\nother(kept).mean().backward()\nopt2.step()",
        questions.UPDATES,
    ),
    "a sum over samples": ("model(x).sum().backward()\nopt.step()", questions.SUMS),
    "a small batch is skipped": (
        "if len(x) < 4:\n    continue\nloss.backward()\nopt.step()",
        questions.SKIPS,
    ),
    "a function is left": ("loss.backward()\nopt.step()\nif i > 3:\n    return", questions.LEAVES),
    "a graph in two updates": (
        "fake = model(x)\nfake.mean().backward()\nopt.step()\nother(fake).mean().backward()\nopt2.step()",
        questions.UPDATES,
    ),
    "an attribute in two updates": (
        "box.fake = x\nloss.backward()\nopt.step()\nother(box.fake).mean().backward()\nopt2.step()",
        questions.UPDATES,
    ),
}

TRAIN = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

def seeded(number):
    torch.manual_seed(number)

def main(options, box, one, two):
    loader = DataLoader(list(range(8)), batch_size=4)
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt2 = torch.optim.SGD(other.parameters(), lr=0.1)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)
    for epoch in range(2):
        for i, x in enumerate(loader):
            loss = model(x).mean()
"""


@pytest.mark.parametrize("name", UNLIKE)
def test_what_only_looks_alike_is_a_question(tmp_path: Path, name: str) -> None:
    body, question = UNLIKE[name]
    path = tmp_path / "train.py"
    path.write_text(TRAIN + "".join(f"            {line}\n" for line in body.splitlines()))
    made = convert(path)
    assert question in [one.text for one in made.questions], made.text
    lines = made.text.splitlines()
    for one in made.questions:
        assert lines[one.after - 1].strip() == QUESTION + one.text


def test_divisions_of_other_numbers_stay(tmp_path: Path) -> None:
    body = "(loss / 2).backward()\nif (i + 1) % 2 == 0:\n    opt.step()\n    opt.zero_grad()\n"
    path = tmp_path / "train.py"
    text = TRAIN + "".join(f"            {line}\n" for line in body.splitlines())
    path.write_text(f"{text}    held = len(one) // 2\n    batches = len(loader) // 2\n")
    made = convert(path)
    assert "batch_size=4 * 2" in made.text
    assert "held = len(one) // 2\n" in made.text
    assert "batches = len(loader)\n" in made.text
    assert "run.backward(loss)" in made.text


def test_a_seed_that_a_function_is_given_is_a_question(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = TRAIN.replace("    loader =", "    seeded(options.seed)\n    loader =")
    path.write_text(f"{text}            loss.backward()\n            opt.step()\n")
    assert questions.SEED in [one.text for one in convert(path).questions]


def test_questions_about_one_line_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    path = script(tmp_path, "a = b = c = d = e = 0", "a = b = c = d = e = step")
    path.write_text(path.read_text().replace("model(x)", "model(x + a + b + c + d + e)"))
    comments = re.findall(r"question: (\w) goes from one iteration", convert(path).text)
    assert comments == list("abcde")


def test_what_check_finds_in_the_converted_script_is_a_question(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    average = "    mean = torch.optim.swa_utils.AveragedModel(model)\n    sched ="
    lines = ("loss.backward()", "opt.step()", "mean.update_parameters(model)")
    body = "".join(f"            {line}\n" for line in lines)
    path.write_text(TRAIN.replace("    sched =", average) + body)
    made = convert(path)
    (one,) = [one for one in made.questions if one.text.startswith("LS605")]
    assert made.text.splitlines()[one.after - 1].strip() == QUESTION + one.text
    assert path.read_text().splitlines()[one.before - 1].strip() == "mean.update_parameters(model)"


def test_without_libcst_the_extra_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(before="", inside="", after=""))
    code = (
        "import sys; sys.modules['libcst'] = None; from lockstep.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(script)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "pip install 'torch-lockstep[check]'" in done.stderr
