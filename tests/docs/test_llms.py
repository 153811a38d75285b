"""The site has llms.txt, made of its own table of contents, and all of its links lead somewhere."""

import re
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

pytest.importorskip("sphinx", reason="needs the extra docs")
pytest.importorskip("myst_parser")
pytest.importorskip("furo")

from sphinx.application import Sphinx

DOCS = Path(__file__).parents[2] / "docs"

# To write the reference takes minutes; short pages stand for it.
REFERENCE = {
    "index.md": "# Reference\n\nFrom the docstrings.\n\n```{toctree}\nalgorithms\n```\n",
    "algorithms.rst": "Algorithms\n==========\n\nWhat the package has.\n",
    "methods.md": "# Which method\n\nWhat each takes.\n",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of docs with a short reference, as HTML."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "docs"
    copytree(DOCS, source, ignore=ignore_patterns("_build", "__pycache__", "reference"))
    (source / "reference").mkdir()
    for name, text in REFERENCE.items():
        (source / "reference" / name).write_text(text)
    (source / "conf.py").write_text(
        'project = "lightfed"\nextensions = ["myst_parser", "llms"]\nmyst_heading_anchors = 3\n'
    )
    built = folder / "built"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        patch.delitem(sys.modules, "llms", raising=False)
        app = Sphinx(
            str(source), str(source), str(built), str(folder / "trees"), "html", status=None,
            warning=None,
        )  # fmt: skip
        app.build()
    return built


def test_it_has_the_form_of_llmstxt(site: Path) -> None:
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# lightfed"
    assert re.fullmatch(r"> .*clients.*\.", lines[2])
    captions = re.findall(r"^:caption: (.+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert [line[3:] for line in lines if line.startswith("## ")] == captions
    for line in lines[3:]:
        assert not line or line.startswith("## ") or re.fullmatch(r"- \[.+\]\(\S+\)(: .+)?", line)


def test_every_page_is_listed_and_every_link_leads_somewhere(site: Path) -> None:
    links = re.findall(r"^- \[.+?\]\((\S+?)\)", (site / "llms.txt").read_text(), re.MULTILINE)
    for link in links:
        assert (site / link).stat().st_size > 0
    assert "reference/algorithms.txt" in links

    in_contents = set(re.findall(r"^([\w/]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    pages = {link.rpartition(".")[0] for link in links}
    assert in_contents <= pages
    for link in links:
        if link.endswith(".md") and not link.startswith("reference/"):
            assert (site / link).read_bytes() == (DOCS / link).read_bytes()
