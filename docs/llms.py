"""Writes llms.txt into the root of the site: what its pages are, for programs that read them.

The form is that of llmstxt.org: a title, a quoted summary, and a section of links for each part of
the table of contents. A link leads to the source of a page, which is Markdown beside the page of
HTML. Pages of the reference have no such source; theirs is the text of the page.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.text import TextBuilder
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

NAME = "llms.txt"
_LONGEST = 200  # characters of the line about a page


def write(app: Sphinx, exception: Exception | None) -> None:
    """Write llms.txt and the plain form of every page, at the end of a build of HTML.

    Raises:
        ExtensionError: A link leads nowhere.
    """
    if exception is not None or app.builder.format != "html":
        return

    env = app.env
    root = str(app.config.root_doc)
    summary = first_sentence(env.get_doctree(root))
    lines = [f"# {app.config.project}", "", f"> {summary}", ""]
    for caption, pages in sections(env, root):
        lines += [f"## {caption}", ""]
        for page in pages:
            link = _write_plain(app, page)
            if not (Path(app.outdir) / link).is_file():
                raise ExtensionError(f"{NAME}: {link} is not there")
            about = first_sentence(env.get_doctree(page))
            title = env.titles[page].astext()
            lines.append(f"- [{title}]({link}): {about}" if about else f"- [{title}]({link})")
        lines.append("")
    (Path(app.outdir) / NAME).write_text("\n".join(lines))


def sections(env: BuildEnvironment, root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the parts of the table of contents: their captions, and the pages below them."""
    for toctree in env.get_doctree(root).findall(addnodes.toctree):
        pages: list[str] = []
        for page in toctree["includefiles"]:
            pages += [page, *_below(env, page)]
        yield str(toctree["caption"] or "Pages"), pages


def _below(env: BuildEnvironment, page: str) -> Iterator[str]:
    """Yield the pages below a page, at any depth."""
    for child in env.toctree_includes.get(page, ()):
        yield child
        yield from _below(env, child)


def _write_plain(app: Sphinx, page: str) -> str:
    """Write the plain form of a page beside its HTML; return its path in the site."""
    source = Path(app.env.doc2path(page))
    if source.suffix == ".md":
        copyfile(source, Path(app.outdir) / f"{page}.md")
        return f"{page}.md"

    builder = TextBuilder(app, app.env)
    builder.init()
    builder.prepare_writing({page})
    builder.write_doc(page, app.env.get_and_resolve_doctree(page, builder))
    return f"{page}.txt"


def first_sentence(doctree: nodes.document) -> str:
    """Return the first sentence of a page's text; empty without one."""
    for paragraph in doctree.findall(nodes.paragraph):
        # Not of a table, a list or a description of a class.
        if not isinstance(paragraph.parent, nodes.section | nodes.document):
            continue
        text = " ".join(paragraph.astext().split())
        sentence = re.match(r".+?[.:?](?=\s|$)", text)
        line = (text if sentence is None else sentence[0]).rstrip(":")
        return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
    return ""


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the end of a build."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}
