"""The documents agree with the tree: links, file names, length, and no address of a package index."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from serving.http.schemas import Answer
from tests.helpers_serving import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "client/README.md"])
PROSE_IN = (".py", ".js", ".html", ".css")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PACKAGE_INDEX = re.compile(
    r"pypi\.org|pythonhosted\.org|--(extra-)?index-url|PIP_(EXTRA_)?INDEX_URL|https?://[^\s\"']*/simple\b"
)


def anchors(document: Path) -> set[str]:
    """The fragments that a page of this document has, named after its headings as GitHub does."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> list[str]:
    return [target for target in LINK.findall(document.read_text()) if "://" not in target]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for target in links(document):
        name, _, fragment = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        if fragment:
            assert fragment in anchors(path), target


def test_every_guide_and_report_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    listed = {(index.parent / target).resolve() for target in links(index)}
    sections = [path for name in ("howto", "reference", "reports") for path in (ROOT / "docs" / name).glob("*.md")]
    assert len(sections) > 10
    assert set(sections) <= listed


def test_how_to_documents_leave_measurements_to_the_reports() -> None:
    guides = sorted((ROOT / "docs/howto").glob("*.md"))
    assert len(guides) > 10
    measured = re.compile(r"^#+ (measured|measurements|figures)\b", re.MULTILINE | re.IGNORECASE)
    assert [guide.name for guide in guides if measured.search(guide.read_text())] == []


PATH = re.compile(r"`((?:models|training|export|serving|tests|docs)/(?:[\w.-]+/)*(?:[\w-]+\.\w+)?)`")


def test_documents_name_files_that_exist() -> None:
    """Except for the recipes, whose files are to be written by the reader."""
    named = {str(path.relative_to(ROOT)): set(PATH.findall(path.read_text())) for path in DOCUMENTS}
    assert len(named["docs/ARCHITECTURE.md"]) > 60
    named.pop("docs/recipes.md")
    assert {
        (document, path) for document, paths in named.items() for path in paths if not (ROOT / path).exists()
    } == set()


def test_the_tables_of_the_architecture_can_be_scanned() -> None:
    rows = [line for line in (ROOT / "docs/ARCHITECTURE.md").read_text().splitlines() if line.startswith("|")]
    assert len(rows) > 100
    assert [cell for row in rows for cell in row.split("|") if len(cell) > 200] == []


SPEECH = re.compile(r"\b(says|said|told|tells)\b", re.IGNORECASE)
IDIOMS = re.compile(r"\b(told|tells \w+) apart\b", re.IGNORECASE)
"""Distinguishing things is not speech."""
WRITTEN_EARLIER = ("CHANGELOG.md",)


def test_programs_and_messages_do_not_speak() -> None:
    """Texts of the product report, print, list or show, and so do documents; the style is in CONTRIBUTING.md."""
    folders = ("models", "training", "export", "serving", "client")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in PROSE_IN]
    assert len(sources) > 300
    documents = [path for path in DOCUMENTS if path.name not in WRITTEN_EARLIER]
    assert len(documents) > 30
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*sources, *documents, ROOT / "openworld.py"]
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if SPEECH.search(IDIOMS.sub("", line))
    ]
    assert found == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_the_two_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    """What they do is tested by tests/e2e/test_make_demo.py; `make test` runs this test."""
    readme = (ROOT / "README.md").read_text()
    section = readme.partition("## Two commands\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^make ([a-z-]+)", block, re.MULTILINE) == ["demo", "test"]
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", section))
    assert "demo-loop" in named
    assert named <= targets


def test_the_guide_names_the_pinned_versions_of_pytorch() -> None:
    """Of another version, `make demo` would replace the build for the CPU."""
    pins = re.findall(r"^(?:torch|torchvision)==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pins) == 2
    assert f"pip install {' '.join(pins)} ...\n" in (ROOT / "docs/howto/install.md").read_text()


def test_the_index_lists_every_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name: set(re.findall(r"`make ([a-z-]+)", (ROOT / name).read_text())) for name in ("docs/README.md", "README.md")
    }
    assert named["docs/README.md"] == targets - {"help"}
    assert {"demo-teach", "compare", "soak", "fuzz", "audit", "sbom"} <= named["README.md"] <= targets


def test_the_response_in_the_readme_is_one_of_the_service() -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    content = json.loads(shown)
    for name in ("tasks", "top"):
        first, *others = content[name]
        assert others == ["..."]
        content[name] = [first]
    # An explanation is there only if the request asks for one.
    assert list(content) == [name for name in Answer.model_fields if name != "explanation"]
    assert Answer.model_validate_json(json.dumps(content)).best_guess == "7"


def hooks() -> list[tuple[str, list[str], bool]]:
    """Id, command and whether it gets names of files, of each hook of pre-commit."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    return [(hook["id"], hook["entry"].split(), hook.get("pass_filenames", True)) for hook in repository["hooks"]]


def test_the_hooks_of_files_accept_a_good_one_and_refuse_a_bad_one(tmp_path: Path) -> None:
    """For pre-commit, a file that a hook has changed is refused, too."""
    contents = {"good.py": "answer = 42\n", "bad.py": "import os\nanswer  =  42\n"}
    run = [command for _, command, takes_files in hooks() if takes_files]
    assert len(run) == 2
    for python, *words in run:
        assert python == ".venv/bin/python"
        for name, content in contents.items():
            path = tmp_path / name
            path.write_text(content)
            done = subprocess.run([sys.executable, *words, path], cwd=ROOT, capture_output=True, text=True, check=False)
            accepted = done.returncode == 0 and path.read_text() == content
            assert accepted == (name == "good.py"), (words, name, done.stdout, done.stderr)


def test_the_hooks_of_the_whole_tree_are_commands_that_start() -> None:
    run = {name: command for name, command, takes_files in hooks() if not takes_files}
    assert run == {
        "mypy": [".venv/bin/python", "-m", "mypy"],
        "documents": [".venv/bin/python", "-m", "pytest", "tests/test_documents.py"],
    }
    assert Path(__file__) == ROOT / run["documents"][-1]


def test_no_file_has_the_address_of_a_package_index() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.is_file() and path != Path(__file__) and PACKAGE_INDEX.search(path.read_text(errors="replace"))
    ]
    assert found == []
