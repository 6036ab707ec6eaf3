"""Rules of the tree that no reader should have to check: who imports whom, what is light, what is documented."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = {"losses": {"losses"}, "actors": {"actors", "losses"}, "recipes": {"recipes", "actors", "losses"}}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Top-level package names that a file imports, and whether a type checker alone sees it."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            yield name.split(".")[0], id(node) in typing_only


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_one_way(package):
    for path in sources(package):
        ours = {name for name, _ in imported(path) if name in LAYERS}
        assert ours <= LAYERS[package], f"{path} imports {ours - LAYERS[package]}"
        if package == "losses":
            others = {name for name, _ in imported(path)} - {"losses", "torch"} - set(sys.stdlib_module_names)
            assert not others, f"{path} imports {others}"


HOMES = {
    "transformers": "actors/pretrained.py",
    "torchstore": "actors/transports/torchstore.py",
    "vllm": "actors/engines/vllm.py",
}


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_has_one_home(library):
    users = {
        str(path.relative_to(ROOT))
        for package in ("actors", "losses")
        for path in sources(package)
        if any(name == library and not typing_only for name, typing_only in imported(path))
    }
    assert users == {HOMES[library]}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_packages_is_light():
    loaded = loaded_by("import actors, losses")
    assert not loaded & {"torch", "transformers", "vllm", "torchtitan", "torchstore"}


def test_torch_free_roles_stay_so():
    loaded = loaded_by(
        "import actors.buffer, actors.rollout, actors.generator, actors.trainer, actors.engines.simulated"
    )
    assert not loaded & {"torch", "transformers", "torchstore"}


def test_help_needs_no_torch_and_every_flag_says_what_it_does():
    code = (
        "import sys\nsys.argv = ['grpo_async', '--help']\nfrom actors import command_line\n"
        "from recipes.grpo_async import Config, train\n"
        "try:\n    command_line(Config, train)\nfinally:\n    print('loaded', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    *text, modules = done.stdout.splitlines()
    assert not set(modules.split()) & {"torch", "transformers", "torchstore"}
    assert any("--buffer.max-staleness" in line for line in text)


def test_every_setting_has_its_help_below_it():
    """Fields of the settings' dataclasses are followed by a text, which becomes the flag's help."""
    bare = []
    files = [
        ROOT / "actors" / "config.py",
        ROOT / "recipes" / "grpo_async.py",
        *sources("losses"),
        *sources("recipes/tasks"),
    ]
    for path in files:
        for cls in ast.walk(ast.parse(path.read_text())):
            if not isinstance(cls, ast.ClassDef) or cls.name in ("LossInputs", "Terms"):
                continue
            if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
                continue
            for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
                if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                    continue
                nested = ast.unparse(field.annotation).endswith("Config")  # its class says it
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if not nested and not documented:
                    bare.append(f"{cls.name}.{ast.unparse(field.target)}")
    assert not bare
