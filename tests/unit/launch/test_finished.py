"""Which scripts surely make one run and do nothing after it."""

from __future__ import annotations

import ast
import sys

import pytest

from lockstep.launch.finished import ends_with_its_run

MAIN = "def main():\n    with lockstep.Run('a'):\n        train()\n"


@pytest.mark.parametrize(
    "script",
    [
        "with Run('a') as run:\n    train(run)",
        MAIN + "main()",
        MAIN + "if __name__ == '__main__':\n    main()",
    ],
)
def test_a_script_that_ends_with_its_run(script: str) -> None:
    assert ends_with_its_run(ast.parse(script))


@pytest.mark.parametrize(
    "script",
    [
        "",
        "with Run('a'):\n    train()\nexport()",
        "with clock(), Run('a'):\n    train()",
        "try:\n    with Run('a'):\n        train()\nfinally:\n    export()",
        "for name in 'ab':\n    with Run(name):\n        train()",
        "with [Run(name) for name in 'ab'][0]:\n    train()",
        "make = lambda: Run('a')\nwith make():\n    train()",
        MAIN + "    export()\nmain()",
        MAIN + "main()\nexport()",
        MAIN + "main()\nmain()",
        MAIN + "[main() for _ in range(2)]",
        MAIN + "list(map(main, 'ab'))\nmain()",
        MAIN + "again = main\nagain()\nmain()",
        "@twice\n" + MAIN + "main()",
    ],
)
def test_a_script_that_may_do_more(script: str) -> None:
    assert not ends_with_its_run(ast.parse(script))


def test_a_script_that_is_nested_too_deeply() -> None:
    tree = ast.parse("1\nwith Run('a'):\n    train()")
    value: ast.expr = ast.Constant(1)
    for _ in range(2 * sys.getrecursionlimit()):
        value = ast.UnaryOp(ast.USub(), value)
    tree.body[0] = ast.Expr(value)
    assert not ends_with_its_run(tree)
