"""The command `openworld`: fast help, names that are checked, options in any place, exit codes."""

from __future__ import annotations

import ast
import os
import re
import resource
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import pytest

from export import cli
from export.__main__ import main as export
from tests.helpers import use_tiny_preset
from tests.helpers_serving import ROOT
from training.evaluate import main as evaluate
from training.fit import make_parser
from training.measure.task_prediction import DEFINITIONS
from training.options import EXTRAS, TP_RULES, install_command
from training.presets import PRESETS
from training.store.tracking import TRACKERS

MODULES = sorted(
    {command.module for command in cli.SUBCOMMANDS.values()} | {"export.cli", "export.demo_loop", "export.samples"}
)
ATTEMPTS = 5
HEAVY = ("torch", "sklearn", "onnx", "matplotlib", "mlflow")
IMPORTED = f"""
import runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_module(MODULE, run_name="__main__")
finally:
    found = sorted(set({HEAVY!r}) & set(sys.modules))
    assert not found, found
"""


@pytest.mark.parametrize("module", MODULES)
def test_the_help_of_every_command_takes_under_a_second_and_imports_nothing_heavy(module: str) -> None:
    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    code = f"MODULE = {module!r}\n{IMPORTED}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    taken = []
    # Processors that are shared with other work take longer for the same instructions.
    while len(taken) < ATTEMPTS and min(taken, default=1.0) >= 1.0:
        before = seconds()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        taken.append(seconds() - before)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: ")
    assert min(taken) < 1.0


WITHOUT_TORCH = """
import runpy, sys
module, *sys.argv[1:] = sys.argv[1:]
sys.modules["torch"] = None
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize(
    "command", [["training.fit"], ["training.evaluate", "run"], ["export", "run", "--out", "b"], ["export.cli", "fit"]]
)
def test_without_torch_a_command_prints_one_line_with_how_to_install_it(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", WITHOUT_TORCH, *command]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    hint = "error: this command needs the package torch: pip install -e '.[train]' in a checkout\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", hint)


def test_a_missing_package_is_installed_with_the_extra_that_lists_it() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = packages_distributions()
    for extra, modules in EXTRAS.items():
        wanted = {re.split(r"[^\w.-]", name)[0].lower().replace("_", "-") for name in listed[extra]}
        for module in modules:
            found = {name.lower().replace("_", "-") for name in installed.get(module, [])}
            assert found & wanted or module not in installed, (extra, module)
            assert install_command(module) == f"pip install -e '.[{extra}]'"
    assert {*listed} - {*EXTRAS} == {"dev", "bench", "collector"}, "extras of no command"
    assert install_command("pyarrow") == "pip install -e '.[batch]'"
    assert install_command("fastapi") == "pip install -e ."


@pytest.mark.parametrize("name", ["serve", "predict"])
def test_the_help_of_serving_names_the_command_and_explains_the_terms(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: openworld {name} ")
    for term in ("task", "unknown", "alpha", "bundle", "shelf", "quarantine"):
        assert f"\n  {term} " in text


def test_the_installed_script_is_this_command() -> None:
    script = Path(sys.executable).with_name("openworld")
    done = subprocess.run([script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == cli.help_text()


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(sys.executable).with_name("openworld")
    done = subprocess.run([script, "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"openworld {version('openworld')}\n"
    assert cli.main(["--help"]) == 0
    assert "openworld --version" in capsys.readouterr().out


def test_a_tree_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", missing)
    assert cli.version_text() == "openworld, not installed: run from its folder"


def test_the_issue_templates_name_commands_that_exist() -> None:
    templates = [*(ROOT / ".github").rglob("*.yml"), *(ROOT / ".github").rglob("*.md")]
    named = {word for path in templates for word in re.findall(r"`openworld ([\w-]+)", path.read_text())}
    assert "--version" in named
    assert named - {"--version"} <= set(cli.SUBCOMMANDS)
    assert len(named) > 1


def test_the_help_explains_the_terms(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["evaluate", "--help"])
    of_evaluate = capsys.readouterr().out
    for term in ("WP, TP", "CIL, TIL", "+c", "alpha", "unknown", "quarantine", "shelf"):
        assert f"\n  {term} " in listed
        assert f"\n  {term} " in of_evaluate
    for name in cli.SUBCOMMANDS:
        assert f"\n  {name} " in listed


def test_the_help_of_fit_names_every_preset_and_tracker() -> None:
    text = " ".join(make_parser().format_help().split())
    for name in {name.removesuffix("-cpu") for name in PRESETS} | set(TRACKERS):
        assert name in text


def test_the_options_know_every_rule_that_there_is() -> None:
    assert (*DEFINITIONS, "tpl") == TP_RULES


def test_an_unknown_subcommand_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evalaute", "run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: command is 'evalaute'; allowed: fit, add-task, ")
    assert error.endswith("; did you mean 'evaluate'?\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--json", "evaluate", "a run"],
            "options of a command follow its name: got --json before evaluate; allowed: openworld evaluate 'a run' "
            "--json\n",
        ),
        (
            ["--out", "b", "export"],
            "options of a command follow its name: got --out before export; allowed: openworld export ",
        ),
        (
            ["--verson"],
            "no such option of openworld itself: got --verson; allowed: --help, --version, or a command; did you mean "
            "'--version'?\n",
        ),
    ],
)
def test_an_option_before_the_subcommand_is_told_its_place(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "run", "--tp", "sigmiod"], "argument --tp: got 'sigmiod'; allowed: argmax, sigmoid, "),
        (["fit", "--loss", "cis"], "argument --loss: got 'cis'; allowed: csi, ce; did you mean 'csi'?"),
        (["evaluate"], "the following arguments are required: RUN"),
        (["serve", "--port", "x"], "argument --port: got 'x'; allowed: 1 to 65535 (see openworld serve --help)"),
        (["predict"], "the following arguments are required: BUNDLE"),
    ],
)
def test_a_usage_error_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add-task", "RUN", "--seed", "1", "two"], "no such option: got --seed; allowed: --compile, --data, --log, "),
        (
            ["fit", "--consolidate", "RUN", "--publish", "SHELF"],
            "no such option: got --consolidate; did you mean: "
            "openworld learn-unknowns RUN --consolidate --publish SHELF (see",
        ),
        (["serve", "--prot=1"], "no such option: got --prot; allowed: --host, --port; did you mean '--port'?"),
        (["discover", "--foo"], "no such option: got --foo; allowed: --bundle, --images, --json, "),
        (["discover", "/nope", "--fo=1"], "no such option: got --fo; allowed: --bundle, --images, --json, "),
        (["export", "--outt", "b", "run"], "no such option: got --outt; allowed: --cascade, "),
        (
            ["serve", "--prto", "80", "--por", "x"],
            "no such option: got --prto; allowed: --host, --port; did you mean '--port'?",
        ),
        (["discover", "--", "--foo"], "the following arguments are required: --bundle"),
        (["verify", "a", "b"], "more arguments than the command takes: got 'b'; allowed: see the usage line"),
        (
            ["predict", "--explain", "pgn", "b"],
            "argument --explain: got 'pgn'; allowed: true, png; did you mean 'png'?",
        ),
        (["export", "RUN", "--out", "b", "--precision", "int8", "x-8"], "argument --precision: got 'x-8'; allowed: "),
        (["export", "--out", "b", "--precision", "RUN"], "argument --precision: got 'RUN'; allowed: "),
    ],
)
def test_what_is_wrong_is_named_and_nothing_else(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    test_a_usage_error_is_one_line(arguments, message, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--precision", "int8", "RUN", "--out", "bundle"],
        ["export", "--out", "bundle", "--precision", "int8", "RUN"],
        ["evaluate", "--odin", "1000", "RUN"],
        ["evaluate", "--odin", "RUN", "--json"],
    ],
)
def test_a_run_that_does_not_exist_is_named_after_a_list(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: RUN: not a run (")


@pytest.mark.parametrize("name", [*cli.SUBCOMMANDS])
def test_every_argument_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    text = capsys.readouterr().out.partition("\nterms:\n")[0]
    listed = re.findall(r"^  ([-A-Z\"].*)(?:\n( +.*))?", text, re.MULTILINE)
    assert listed
    # Help is on the line of the argument, after two spaces or more, or on the next one, further to the right.
    without = [first for first, following in listed if "  " not in first and not following.startswith(" " * 10)]
    assert without == []


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("options", [["--json", "--tp", "power", "--tau", "1", "2"], ["--json", "--odin"]])
def test_options_stand_before_or_after_the_run(
    options: list[str],
    place: int,
    tiny_hat: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_tiny_preset(monkeypatch)
    arguments = [str(tiny_hat), *options] if place else [*options, str(tiny_hat)]
    assert evaluate(arguments) == 0
    assert f'"prediction": "{"odin" if "--odin" in options else "power"}"' in capsys.readouterr().out


@pytest.mark.parametrize("before", [True, False])
def test_a_run_may_follow_a_list_of_precisions(
    before: bool, tiny_hat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    options = ["--out", str(tmp_path / "bundle"), "--precision", "fp32"]
    assert export(["--force", *options, str(tiny_hat)] if before else [str(tiny_hat), *options, "--force"]) == 0
    assert str(tmp_path / "bundle") in capsys.readouterr().out


def test_a_precision_that_does_not_exist_gets_a_suggestion(
    tiny_hat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(tiny_hat), "--out", str(tmp_path / "bundle"), "--precision", "int88"]) == 2
    assert "precision is 'int88'; allowed: " in capsys.readouterr().err


def test_a_task_is_added_by_its_own_subcommand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiny_preset(monkeypatch)
    run = tmp_path / "run"
    assert cli.main(["fit", "--tasks", "zero,one", "--out", str(run)]) == 0
    assert cli.main(["add-task", str(run), "two,treee"]) == 2
    assert "no images of 'treee'" in capsys.readouterr().err
    assert cli.main(["add-task", "--log", "tensorboard", str(run), "two,three"]) == 0
    assert cli.main(["publish", str(run), str(tmp_path / "shelf"), "--cascade", "off", "--force"]) == 0
    assert "2 tasks (0 unchanged), 4 classes" in capsys.readouterr().out


def imported_by(module: str) -> set[str]:
    """All modules, and packages of others, that importing a module of this project imports."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        if name in found:
            continue
        found.add(name)
        for statement in ast.parse(path.read_text()).body if path.is_file() else ():
            if isinstance(statement, ast.Import):
                waiting += [each.name for each in statement.names]
            elif isinstance(statement, ast.ImportFrom) and statement.module:
                waiting += [statement.module, *(f"{statement.module}.{each.name}" for each in statement.names)]
    return found


@pytest.mark.parametrize("module", ["training.run", "export.exporter"])
def test_a_run_is_opened_without_the_rest_of_training(module: str) -> None:
    commands = {"fit", "evaluate", "discover", "diagnose", "compare_scores", "report_page", "study", "plan", "presets"}
    unneeded = {f"training.{name}" for name in commands} | {"training.measure.evaluation"}
    adapters = {"adapters.adapter_learner", "adapters.adapter_training"}
    loop = {"features", "head", "losses", "optimizers", "augment", "learner", *adapters}
    unneeded |= {f"training.learn.{name}" for name in loop}
    unneeded |= {"matplotlib", "jinja2", "rich.console"}
    if module == "training.run":
        unneeded |= {"sklearn.metrics", "sklearn.datasets", "training.data.sources", "training.data.quarantined"}
    found = imported_by(module)
    assert {"training.store.checkpoint", "models.network", "torch"} <= found
    assert not found & unneeded


NEEDED = {
    "add-task": ["RUN", "cat"],
    "export": ["RUN", "--out", "BUNDLE"],
    "publish": ["RUN", "SHELF"],
    "push": ["BUNDLE", "URL"],
    "pull": ["URL", "FOLDER"],
    "discover": ["--quarantine", "URL", "--bundle", "BUNDLE"],
    **{name: [] for name in ("fit", "study", "cache", "serve")},
}
"""The arguments that a command cannot do without; one, unless it is listed here."""


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_an_unknown_argument_cannot_control_the_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, *NEEDED.get(name, ["X"]), "--no\x1b[2J\nsuch"])
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert shown.startswith(r"error: no such option: got --no\x1b[2J\nsuch; allowed: ")
    assert shown.endswith(f" (see openworld {name} --help)\n")
    assert shown.count("\n") == 1
