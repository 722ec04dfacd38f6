"""The examples on VOC, CIFAR-10, ImageNet folders and text: one digest everywhere, clear errors."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.errors import PREEMPTED
from tests.adversary.verifying import Verify
from tests.conftest import Lockstep
from tests.template import Template

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.forked


@pytest.fixture
def template(examples_template: Template) -> Template:
    """The process that commands are forked from."""
    return examples_template


@dataclass(frozen=True)
class Example:
    """A script and its smallest training.

    Attributes:
        name: of its file.
        arguments: besides --data.
        kill: a step in the middle of the second epoch.
        steps: how many there are.
        images: in the data that `data.py` writes; 0: it reads sources of Python.
        needs: packages.
        wide: `make test` leaves its digests to `make test-wide`.
    """

    name: str
    arguments: str
    kill: int
    steps: int
    images: int = 0
    needs: tuple[str, ...] = ("torchvision",)
    wide: bool = False


LIST = [
    Example(
        "voc",
        "--backbone mobilenet_v3_large --crop 33 --batch-size 8 --workers 1 --epochs 2",
        kill=4,
        steps=4,
        images=20,
        wide=True,
    ),
    Example("cifar10", "--batch-size 8 --epochs 2", kill=5, steps=6, images=20),
    Example(
        "imagenet",
        "--arch shufflenet_v2_x0_5 --amp --train-crop-size 32 --val-resize-size 36 --val-crop-size 32 "
        "--batch-size 8 --workers 0 --lr-warmup-epochs 1 --epochs 2",
        kill=4,
        steps=4,
        images=20,
        wide=True,
    ),
    Example(
        "language_model",
        "--n-positions 32 --n-embd 16 --n-layer 1 --n-head 2 --batch-size 8 --epochs 2",
        kill=14,
        steps=20,
        needs=("transformers",),
    ),
]
BY_NAME = {example.name: example for example in LIST}


def params(*names: str, wide: bool = False) -> list[object]:
    """Return the examples called `names`, or all of them; skipped where a package is missing.

    Args:
        names: of files.
        wide: whether the marks of examples that are wide count.
    """
    found = []
    for name in names or BY_NAME:
        missing = [one for one in BY_NAME[name].needs if importlib.util.find_spec(one) is None]
        marks = [pytest.mark.skip(reason=f"{', '.join(missing)} not installed")] * bool(missing)
        marks += [pytest.mark.wide] * (wide and BY_NAME[name].wide)
        found.append(pytest.param(BY_NAME[name], id=name, marks=marks))
    return found


@functools.cache
def images(example: Example) -> Path:
    """Write the images of an example, once for all tests."""
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made)
    words = (example.name, str(made / "data"), "--images", str(example.images), "--size", "40")
    subprocess.run([sys.executable, EXAMPLES / "data.py", *words], check=True, timeout=60)
    return made / "data"


def with_data(example: Example, directory: Path) -> list[str]:
    """Write the data of an example into `directory`; return the example's arguments."""
    if example.images:
        shutil.copytree(images(example), directory)
    else:
        directory.mkdir()
        for number in range(40):
            text = f"import os\n\n\ndef f{number}(x):\n    return {'x + ' * (number % 7)}{number}\n"
            (directory / f"m{number:02}.py").write_text(text)
    return ["--data", str(directory), *example.arguments.split()]


@pytest.fixture
def verify(template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """`lockstep verify`, in a temporary directory."""
    return Verify(template, tmp_path, monkeypatch)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("example", params(wide=True))
def test_one_digest_on_every_layout(verify: Verify, example: Example) -> None:
    arguments = with_data(example, verify.directory / "data")
    layouts = ["1", "2", "3", f"2,kill@{example.kill}"]
    verdict = verify(EXAMPLES / f"{example.name}.py", layouts, arguments)
    assert verdict.difference is None, verdict.difference.text
    assert verdict.same, verdict.as_json()
    assert [outcome.kills for outcome in verdict.outcomes] == [0, 0, 0, 1]
    assert {outcome.steps for outcome in verdict.outcomes} == {example.steps}


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.parametrize("example", params("cifar10"))
def test_small_data_can_be_learnt(lockstep: Lockstep, example: Example) -> None:
    words = ("cifar10", "data", "--images", "2000")
    subprocess.run(
        [sys.executable, EXAMPLES / "data.py", *words], check=True, cwd=lockstep.directory
    )
    script = str(EXAMPLES / f"{example.name}.py")
    done = lockstep("run", "-n", "2", script, "--data", "data", "--epochs", "5")
    accuracies = re.findall(r"^test accuracy ([\d.]+)%$", done.out, re.MULTILINE)
    assert max(map(float, accuracies)) >= 50, done.out + done.err


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("example", params())
def test_the_form_for_one_device_runs(lockstep: Lockstep, example: Example) -> None:
    arguments = with_data(example, lockstep.directory / "data")
    script = str(EXAMPLES / f"plain_{example.name}.py")
    done = lockstep.python(script, *arguments, env={"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 2


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("example", params("voc", "cifar10", "imagenet"))
def test_without_data_an_example_names_what_writes_some(
    lockstep: Lockstep, example: Example
) -> None:
    script = str(EXAMPLES / f"{example.name}.py")
    done = lockstep("run", script, "--data", "nowhere")
    assert done.code == 1, done.out
    (line,) = [
        line for line in done.err.splitlines() if line.startswith(f"{example.name}.py: error")
    ]
    assert " in nowhere; for small data: " in line
    assert f"python examples/data.py {example.name} nowhere --images" in line
    assert "Traceback" not in done.err


@pytest.mark.parametrize("example", params("language_model"))
def test_a_directory_without_sources_is_refused(lockstep: Lockstep, example: Example) -> None:
    done = lockstep("run", str(EXAMPLES / f"{example.name}.py"), "--data", ".")
    assert done.code == 1, done.out
    assert "error: argument --data: 0 *.py below .; expected at least 2" in done.err


#: An image of each form, and its index.
IMAGES = {
    "voc": ("VOCdevkit/VOC2012/JPEGImages/2007_000011.jpg", 11),
    "imagenet": ("train/n00000002/n00000002_12.JPEG", 4),
}


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("example", params(*IMAGES))
def test_a_truncated_image_is_named_with_its_index(lockstep: Lockstep, example: Example) -> None:
    file, index = IMAGES[example.name]
    arguments = with_data(example, lockstep.directory / "data")
    image = lockstep.directory / "data" / file
    image.write_bytes(image.read_bytes()[:-200])
    done = lockstep("run", "-n", "2", str(EXAMPLES / f"{example.name}.py"), *arguments)
    assert done.code == 1, done.out
    verdict = done.err.rpartition("\nlockstep: rank ")[2]
    assert f"data/{file}" in verdict.splitlines()[0]
    assert "image file is truncated" in verdict.splitlines()[0]
    assert verdict.splitlines()[1].startswith(f"  sample {index} of ")
    assert "restart" not in done.err


@pytest.mark.parametrize("example", params("voc"))
def test_a_label_that_is_no_class_of_voc_is_named(lockstep: Lockstep, example: Example) -> None:
    from PIL import Image

    arguments = with_data(example, lockstep.directory / "data")
    mask = lockstep.directory / "data/VOCdevkit/VOC2012/SegmentationClass/2007_000007.png"
    image = Image.new("P", (40, 30), 77)
    image.putpalette(range(256))
    image.save(mask)
    done = lockstep("run", str(EXAMPLES / "voc.py"), *arguments)
    assert done.code == 1, done.out
    assert f"ValueError: {mask}: label 77; expected 0 to 20, or 255\n  sample 7 of" in done.err


@pytest.mark.parametrize("example", params("cifar10"))
def test_a_label_that_is_no_class_of_cifar_is_named(lockstep: Lockstep, example: Example) -> None:
    arguments = with_data(example, lockstep.directory / "data")
    file = lockstep.directory / "data/cifar-10-batches-py/data_batch_2"
    batch = pickle.loads(file.read_bytes())  # noqa: S301 - of our own
    batch["labels"][1] = 12
    file.write_bytes(pickle.dumps(batch))
    done = lockstep("run", str(EXAMPLES / "cifar10.py"), *arguments)
    assert done.code == 1, done.out
    assert f"ValueError: {file}: label 12 of image 5; expected 0 to 9" in done.err


@pytest.mark.parametrize("example", params("imagenet"))
def test_a_class_without_images_to_test_with_is_named(lockstep: Lockstep, example: Example) -> None:
    arguments = with_data(example, lockstep.directory / "data")
    new = lockstep.directory / "data/val/n00000099"
    (lockstep.directory / "data/val/n00000003").rename(new)
    done = lockstep("run", str(EXAMPLES / "imagenet.py"), *arguments)
    assert done.code == 1, done.out
    assert "ValueError: " in done.err
    assert "is not in both of train/ and val/" in done.err


@pytest.mark.ranks(2)
@pytest.mark.parametrize("example", params("imagenet"))
def test_the_same_command_goes_on_and_the_best_weights_can_be_taken_out(
    lockstep: Lockstep, example: Example
) -> None:
    script = str(EXAMPLES / "imagenet.py")
    command = ("run", "-n", "2", "--run-dir", "out", script)
    arguments = with_data(example, lockstep.directory / "data")
    first = lockstep(*command, *arguments, env={"LOCKSTEP_FAULTS": "term@2"})
    second = lockstep(*command, *arguments)
    assert (first.code, second.code) == (PREEMPTED, 0), first.err + second.err
    assert re.search(r", resuming after step [123] \(step-", second.err)
    tested = re.findall(
        r"^test top-1 ([\d.]+)% top-5 [\d.]+%$", first.out + second.out, re.MULTILINE
    )
    assert len(tested) == 2
    done = lockstep("export", "out", "--best", "-o", "best.pt")
    assert done.code == 0, done.err
    evaluated = lockstep("run", script, *arguments, "--weights", "best.pt", "--evaluate")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.out.startswith(f"test top-1 {max(tested, key=float)}% top-5 ")
    assert "finished steps=0 " in evaluated.out


def test_data_is_not_written_over_other_files(lockstep: Lockstep) -> None:
    (lockstep.directory / "mine").write_text("x")
    done = lockstep.python(str(EXAMPLES / "data.py"), "voc", ".", "--images", "10")
    assert done.code == 2
    assert "error: . is not empty; expected a new directory" in done.err


@pytest.mark.parametrize("example", LIST, ids=lambda example: example.name)
def test_an_example_is_short(example: Example) -> None:
    assert len((EXAMPLES / f"{example.name}.py").read_text().splitlines()) < 150
