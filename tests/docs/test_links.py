"""Links of the pages lead somewhere, with a text that says where, on a git host and on the site."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]

# Pages that a build of the site writes.
WRITTEN = re.compile(r"reference/\w+\.(md|rst)$")


def links(page: Path) -> list[tuple[str, str]]:
    """The texts and targets of a page's links, without those to other sites."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "code", prose)
    found = re.findall(r"\[([^][]*)\]\(([^()\s]*)\)", prose)
    return [(text, target) for text, target in found if "://" not in target]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_text_and_a_target(page: Path) -> None:
    for text, target in links(page):
        assert text, f"a link to {target} says nothing"
        path, _, anchor = target.partition("#")
        if WRITTEN.search(path):
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), f"{target} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target} has no such heading"


def test_the_first_page_leads_to_every_page() -> None:
    targets = {target.partition("#")[0] for _, target in links(ROOT / "docs/index.md")}
    reached_from_others = {"docs/kernels.md", "docs/versions.md", "docs/index.md"}
    for page in PAGES[3:]:
        name = str(page.relative_to(ROOT / "docs"))
        if name.startswith(("studies/", "reference/")):
            continue
        assert name in targets or f"docs/{name}" in reached_from_others, name


@pytest.fixture
def conf(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The settings of the site, which need Sphinx."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs/conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_names_of_methods_link_to_the_reference(conf: ModuleType) -> None:
    from docutils import nodes
    from docutils.utils import new_document

    entry = SimpleNamespace(docname="reference/algorithms", node_id="lightfed.HeteroFL")
    domain = SimpleNamespace(objects={"lightfed.HeteroFL": entry})
    app: Any = SimpleNamespace(
        env=SimpleNamespace(get_domain=lambda _: domain),
        builder=SimpleNamespace(get_relative_uri=lambda page, target: f"{target}.html"),
    )
    page = new_document("page")
    paragraph = nodes.paragraph()
    paragraph += nodes.literal(text="HeteroFL")
    paragraph += nodes.literal(text="nothing of ours")
    page += paragraph

    conf.link_names(app, page, "catalogue")
    (link,) = page.findall(nodes.reference)
    assert link["refuri"] == "reference/algorithms.html#lightfed.HeteroFL"
    assert link.astext() == "HeteroFL"
