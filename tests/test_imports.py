"""The direction of imports between the packages, no import cycles, and a server that needs nothing of training."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers_serving import ROOT

PACKAGES = ("models", "training", "export", "serving")
ALLOWED = {
    "models": ("models", "serving.bundle.atomic", "serving.bundle.labels"),
    "training": ("training", "models", "serving.bundle", "serving.quarantine"),
    "export": (
        *("export", "training", "models", "serving.bundle"),
        *(f"serving.teaching.{name}" for name in ("curriculum", "errors", "learning", "trial", "writing")),
    ),
    "serving": ("serving",),
    "serving.bundle": ("serving.bundle",),
}
"""Package -> what it may import of the project; the longest name that fits a module counts."""
DEMONSTRATIONS = ("export.demo_loop", "export.demo_teach", "export.demo")
"""These start a server and send it requests as a person would, so they may import all of serving."""
TEACHING = tuple(f"serving.teaching.{name}" for name in ("work", "lesson_job", "group_job", "auto_job", "api.routes"))
SERVING = ("serving.bundle.model", "serving.predict", "serving.http.app", "serving.service", "serving.model", *TEACHING)
OF_EXTRAS = ("numba", "ray", "umap")
"""Large packages that only a command, a process or a request that needs them imports."""
OF_TRAINING = ("torch", "torchvision", "onnx", "sklearn", "safetensors", "models", "training", "export")


def module_files(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, Path]:
    """Module name -> file."""
    found = {}
    for package in packages:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, modules: Mapping[str, object], *, at_import_time: bool) -> Iterator[str]:
    """Names of the imported modules; `from a import b` imports a.b if that is a module of the project."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            base = node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in modules else base
        elif at_import_time and _runs_later(node):
            continue
        else:
            yield from imports(node, modules, at_import_time=at_import_time)


def _runs_later(node: ast.AST) -> bool:
    """Whether importing the module does not run this: a function's body, or imports for type checkers only."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def forbidden_imports(root: Path) -> list[str]:
    """One line for each import in the wrong direction."""
    modules = module_files(root)
    wrong = []
    for module, path in modules.items():
        package = max((name for name in ALLOWED if within(module, name)), key=len)
        allowed = PACKAGES if any(within(module, each) for each in DEMONSTRATIONS) else ALLOWED[package]
        for name in imports(ast.parse(path.read_text()), modules, at_import_time=False):
            ours = name.partition(".")[0] in PACKAGES and not any(within(name, each) for each in allowed)
            library = package.startswith("serving") and name.partition(".")[0] in OF_TRAINING
            if ours or library:
                wrong.append(f"{module} imports {name}")
    return wrong


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one import cycle, or []."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        path.append(module)
        for name in sorted(graph[module]):
            if cycle := visit(name):
                return cycle
        finished.add(path.pop())
        return []

    return next(filter(None, map(visit, sorted(graph))), [])


def import_graph(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, set[str]]:
    """Module -> modules of the project that its import imports."""
    modules = module_files(root, packages)
    return {
        module: {
            name
            for name in imports(ast.parse(path.read_text()), modules, at_import_time=True)
            if name in modules and name != module
        }
        for module, path in modules.items()
    }


def write_modules(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_packages_import_in_one_direction() -> None:
    assert forbidden_imports(ROOT) == []


def test_the_exceptions_are_documented_and_used() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    modules = module_files(ROOT)
    for package in ("models", "training", "export"):
        used = {
            name
            for module, path in modules.items()
            if within(module, package) and not any(within(module, each) for each in DEMONSTRATIONS)
            for name in imports(ast.parse(path.read_text()), modules, at_import_time=False)
        }
        for name in (name for name in ALLOWED[package] if name.startswith("serving.")):
            file = name.replace(".", "/")
            assert f"`{file}.py`" in text or f"`{file}/`" in text, name
            assert any(within(each, name) for each in used), f"{package} may import {name} and does not"
    assert {f"`{name.replace('.', '/')}{'/' if name == 'export.demo' else '.py'}`" for name in DEMONSTRATIONS} <= {
        *re.findall(r"`[\w/.]+`", text)
    }


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("serving/bundle/a.py", "from serving import errors", "serving.bundle.a imports serving"),
        ("serving/a.py", "def f():\n    import torch", "serving.a imports torch"),
        ("training/a.py", "from serving.settings import Settings", "training.a imports serving.settings"),
        ("export/a.py", "from serving.http import app", "export.a imports serving.http"),
        ("models/sub/a.py", "import training.fit", "models.sub.a imports training.fit"),
        ("models/a.py", "import serving.bundle.layout", "models.a imports serving.bundle.layout"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(file: str, line: str, found: str, tmp_path: Path) -> None:
    write_modules(tmp_path, {file: line, "export/good.py": "from serving.bundle.layout import MANIFEST"})
    assert forbidden_imports(tmp_path) == [found]


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 100
    assert find_cycle(graph) == []


def test_a_cycle_is_found(tmp_path: Path) -> None:
    files = {
        "p/__init__.py": "",
        "p/a.py": "from p.b import x",
        "p/b.py": "try:\n    from p import c\nexcept ImportError: ...",
        "p/c.py": "class C:\n    import p.a",
        "p/d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.e",
        "p/e.py": "def f():\n    import p.d\nimport p.d",
    }
    assert find_cycle(import_graph(write_modules(tmp_path, files), ("p",))) == ["p.a", "p.b", "p.c", "p.a"]
    (tmp_path / "p/c.py").write_text("def later():\n    import p.a")
    assert find_cycle(import_graph(tmp_path, ("p",))) == []


def test_serving_needs_nothing_of_training() -> None:
    """Other libraries must not import it either, whether it is installed or not."""
    forbid = f"""
import sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OF_TRAINING + OF_EXTRAS!r}:
            raise ImportError(f"forbidden: {{name}}")

sys.meta_path.insert(0, Forbid())
"""
    for before in ("import sys", forbid):
        code = f"{before}\nimport {', '.join(SERVING)}\nassert not {{*{OF_TRAINING!r}}} & set(sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == done.stderr == ""


def test_every_package_has_its_init_file_in_git() -> None:
    """A pattern in .gitignore must not hide a package: ruff and wheels would leave it out."""
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    files = {Path(name) for name in tracked.stdout.split()}
    folders = {path.parent for path in files if path.suffix == ".py"}
    assert folders
    assert [str(folder) for folder in sorted(folders) if folder / "__init__.py" not in files] == []


@pytest.mark.parametrize("package", ["training", "serving"])
def test_the_top_of_a_package_has_at_most_twelve_files(package: str) -> None:
    files = [file.name for file in (ROOT / package).glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= 12, sorted(files)


def test_no_class_name_means_two_things() -> None:
    places: dict[str, list[str]] = {}
    for module, path in module_files(ROOT).items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
