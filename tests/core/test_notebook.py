"""Several ranks of a notebook."""

from pathlib import Path

from lightfed.testing.processes import start, status_of


def test_ranks_forked_from_a_notebook(tmp_path: Path) -> None:
    printed, errors = tmp_path / "printed", tmp_path / "errors"
    pid = start(
        "tests.core.notebook", folder=str(tmp_path), printed=str(printed), errors=str(errors)
    )
    assert status_of(pid, 300) == 0, errors.read_text()[-3000:]
    assert "1 of 3 rounds" in errors.read_text()
    assert list(tmp_path.glob("runs/HeteroFL-*/index.html"))
