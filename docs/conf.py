"""The site: `pip install -e '.[docs]' && sphinx-build -W docs docs/_build`.

Pages are Markdown; the reference is written from the docstrings of the public names. Fonts are the
reader's, and nothing is fetched.
"""

import inspect
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

import lightfed
from lightfed.utils.keys import COLUMNS, KEYS

sys.path.insert(0, str(Path(__file__).parent))
import methods

project = "lightfed"
version = release = lightfed.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "llms"]
html_theme = "furo"
html_title = f"lightfed {release}"
html_show_copyright = False
exclude_patterns = ["_build"]
default_role = "code"  # single backticks in docstrings
myst_heading_anchors = 3
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True, "exclude-members": "__new__"}
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True
# A page of the reference: its title, and the packages whose names it lists.
PAGES = {
    "api": ("Algorithms of your own", "api."),
    "engine": ("Federation and trainer", "engine."),
    "local": ("Clients", "local.", "models."),
    "algorithms": ("Algorithms of the package", "algorithms."),
    "data": ("Data sets and partitions", "data.", "datasets."),
    "networks": ("Networks", "networks."),
    "state": ("Server models", "state.", "aggregation."),
    "testing": ("Testing", "testing"),
}
# what the author of an algorithm declares, or is handed, and does not import
HANDED = """
.. autoclass:: lightfed.local.hooks.Hooks
   :no-members:

.. autoclass:: lightfed.local.hooks.SessionContext

.. autoclass:: lightfed.local.optimizer.Proximal

.. autoclass:: lightfed.state.client_state.Kept
   :no-members:

.. autoclass:: lightfed.state.rows.Row

.. autoclass:: lightfed.state.rows.ModelLayout
"""
HEAD = """# Reference

From the docstrings; all names are in `lightfed` itself: `import lightfed as lf`.

```{toctree}
"""
# what an algorithm's file says of its paper, above its classes
MODULE = """
.. rubric:: {0}

.. automodule:: lightfed.{0}
   :no-members:
   :no-index:
"""


KEYS_HEAD = """# Keys and columns

`--ckpt_path last` resumes a run of the same name whose keys of the first kind are equal. Reports
pool runs as seeds of one experiment whose keys of the second kind are equal. Keys below one of
these are like it, with two exceptions: what has `seed` in its name is like `model.seed`, and below
`data` the keys `root` and `download` make no difference.

| key | another run | another experiment | name in reports | unit |
|---|---|---|---|---|"""
COLUMNS_HEAD = """
Columns of `metrics.csv`, `clients.csv` and `timings.csv`. All others are metrics, or in
`timings.csv` the seconds of a part of the round.

| column | tables | unit | meaning |
|---|---|---|---|"""


def write_reference(app: Sphinx) -> None:
    """Write the pages of the reference to docs/reference/."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    for page, (title, *packages) in PAGES.items():
        parts = [f"{title}\n{'=' * len(title)}\n"]
        for module, names in lightfed._NAMES.items():
            if not module.startswith(tuple(packages)):
                continue
            if page == "algorithms":
                parts.append(MODULE.format(module))
            parts += [_entry(name, page) for name in names.split()]
        if page == "api":
            parts.append(HANDED)
        _write(folder / f"{page}.rst", "\n".join(parts))
    _write(folder / "keys.md", keys_page())
    _write_methods(folder / "methods.md")
    _write(folder / "index.md", f"{HEAD}keys\n{chr(10).join(PAGES)}\n```\n")


def _write_methods(page: Path) -> None:
    """Only after a change of the code: it sets up a few hundred federations."""
    sources = [Path(methods.__file__), *Path(lightfed.__file__).parent.rglob("*.py")]
    if not page.is_file() or page.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        page.write_text(methods.page())


def keys_page() -> str:
    """Every key of a configuration and every column, from the table that the program reads."""
    keys = [
        f"| `{key}` | {'no' if k.role in ('how', 'extent') else 'yes'} "
        f"| {'no' if k.role in ('how', 'seed') else 'yes'} | {k.column or ''} | {k.unit} |"
        for key, k in KEYS.items()
    ]
    columns = [
        f"| `{name}` | {c.tables.replace(' ', ', ')} | {c.unit} | {c.meaning} |"
        for name, c in COLUMNS.items()
    ]
    return "\n".join((KEYS_HEAD, *keys, COLUMNS_HEAD, *columns, ""))


def _entry(name: str, room: str) -> str:
    if not inspect.isclass(getattr(lightfed, name)):
        return f".. autofunction:: lightfed.{name}\n"
    inherited = "   :inherited-members: Module\n" * (room == "api")  # what an author may call
    return f".. autoclass:: lightfed.{name}\n{inherited}"


def _write(path: Path, text: str) -> None:
    """Only if it changed: else every build would read all pages again."""
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def plain(
    app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]
) -> None:
    """Docstrings are plain text: bars and stars in them, such as |Q_n|, are no markup."""
    for at, line in enumerate(lines):
        parts = line.split("`")  # what is in backticks stands as it is
        parts[::2] = [re.sub(r"(?<=[^\\])([*|])", r"\\\1", part) for part in parts[::2]]
        lines[at] = re.sub(r"(`\w+`)(?=\w)", r"\1\\ ", "`".join(parts))  # `Row`s


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Link names of the package in back-quotes, such as `HeteroFL`, to the reference.

    Pages stay plain Markdown, which a git host shows as it is.
    """
    objects = app.env.get_domain("py").objects  # type: ignore[attr-defined]
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext().removeprefix("lightfed.").removeprefix("lf.")
        entry = objects.get(f"lightfed.{name}")
        is_linked = isinstance(literal.parent, nodes.reference | nodes.title)
        if entry is None or is_linked or entry.docname == page:
            continue
        target = app.builder.get_relative_uri(page, entry.docname)
        link = nodes.reference(
            "", "", internal=True, refuri=f"{target}#{entry.node_id}", classes=["name"]
        )
        literal.replace_self(link)
        link += literal


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_reference)
    app.connect("doctree-resolved", link_names)
    app.connect("autodoc-process-docstring", plain, priority=900)  # after napoleon
