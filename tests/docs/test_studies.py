"""Tables of studies in the documents are those of the studies' files."""

import re
from pathlib import Path

import pytest

from lightfed.cli.shipped import ROOT
from lightfed.cli.wanted import Wanted
from lightfed.lab.contest import check_terms
from lightfed.lab.study import STUDIES, digest, methods_of, read_study

TOP = Path(__file__).parents[2]
PAGES = {page.stem: page for page in sorted((TOP / "docs/studies").glob("*.md"))}
HEAD = r"<!-- study (\S+), commit [0-9a-f]{7}.*, \d{4}-\d\d-\d\d, digest ([0-9a-f]{12}) -->"


def stamp(text: str) -> tuple[str, str]:
    """The study's name and the digest of its only stamp."""
    ((name, found),) = re.findall(HEAD, text)
    return name, found


def test_the_studies_of_the_documents_have_pages() -> None:
    assert STUDIES == ROOT / "studies"
    assert PAGES.keys() == {path.stem for path in STUDIES.glob("*.yaml")}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_of_the_study_as_it_is(name: str) -> None:
    """If not: `lightfed study NAME --markdown > docs/studies/NAME.md`."""
    text = PAGES[name].read_text()
    assert stamp(text) == (name, digest(name))
    for method in read_study(name).methods:
        assert f"\n| {method} | " in text


def test_the_readme_has_the_table_of_its_study() -> None:
    """Its stamp and its rows are those of the study's page."""
    page, readme = PAGES["showcase"].read_text(), (TOP / "README.md").read_text()
    head, *_ = page.splitlines()
    table = re.search(r"(^\|.*\n)+", page, re.MULTILINE)
    assert table is not None
    assert f"{head}\n{table[0]}" in readme


def test_a_digest_is_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightfed.lab.study.STUDIES", tmp_path)
    contents = {"a": "{x: 1, y: [2]}", "b": "# a comment\ny:\n- 2\nx: 1\n", "c": "{x: 1, y: [3]}"}
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    assert digest("a") == digest("b") != digest("c")


def test_the_study_of_the_page_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its methods can be made in every case, on equal terms, and so can its first trial."""
    monkeypatch.chdir(tmp_path)
    text = (TOP / "docs/studies.md").read_text()
    (written,) = re.findall(r"```yaml\n(title: .*?)```", text, re.DOTALL)
    Path("mine.yaml").write_text(written)
    study = read_study("./mine.yaml")
    assert study.grid is not None
    assert len(study.grid.points) == study.trials == 12
    assert study.size == 2 * 3 * (10 + 12 * 3)
    for case in study.cases:
        wanted = {}
        for method in methods_of("./mine.yaml", study, case):
            wanted[method.name] = Wanted.of([*method.words, *study.grid.points[0]])
        assert check_terms(wanted, study.differ) == []
