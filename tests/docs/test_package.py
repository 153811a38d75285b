"""What a package page shows, and what texts say about installing."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_description_of_the_package_needs_no_file_beside_it() -> None:
    text = (ROOT / PROJECT["readme"]).read_text()
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "docs/" not in text


def test_what_the_description_says_of_versions_are_the_pins() -> None:
    text = (ROOT / PROJECT["readme"]).read_text()
    lowest, above = re.findall(
        r"2\.(\d+)", next(d for d in PROJECT["dependencies"] if "torch>" in d)
    )
    assert f"torch 2.{lowest} to 2.{int(above) - 1}" in text
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')}" in text


def test_nothing_tells_a_user_to_install_lightfed_from_an_index() -> None:
    """It is on none, so that another package of this name might be installed."""
    texts = [ROOT / "README.md", ROOT / "PACKAGE.md", ROOT / "AGENTS.md"]
    folders = (("docs", "md"), ("lightfed", "py"), ("examples", "py"), ("examples", "ipynb"))
    for folder, kind in folders:
        texts += (ROOT / folder).rglob(f"*.{kind}")
    offenders = []
    for path in texts:
        if re.search(r"pip install[^\n`]*[ '\"]lightfed(?![-_\w/])", path.read_text("utf-8")):
            offenders.append(str(path.relative_to(ROOT)))
    assert offenders == []
