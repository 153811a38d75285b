"""The page of a run, index.html in its folder, and the list of the runs beside it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from pandas import DataFrame

from lightfed.lab.drawing.files import write_file, write_files
from lightfed.lab.drawing.markup import document
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.report.figures import run_figures
from lightfed.lab.report.tables import (
    client_group_table,
    headline,
    key_figures,
    measured,
    rounds_text,
)
from lightfed.lab.results.run import NotBegun, Run, primary_metric, read, reading
from lightfed.lab.results.text import goal_text
from lightfed.lab.studies.figures import figures_of_run
from lightfed.utils.errors import UserError
from lightfed.utils.keys import flat

PAGE = "index.html"
DETAILS = ["std over clients", "down / client", "stored / client"]  # on the page alone
CHECKPOINT = Path("checkpoints", "last.ckpt")  # in the folder of a run
FILES = "report"  # folder of figures and tables that were asked for
OURS = "list of lightfed runs"  # in the list


def build(run: Path, *, formats: Sequence[str] = (), tables: Sequence[str] = ()) -> Path:
    """Make the page of a run folder, finished or not, and the list of the runs beside it.

    Args:
        run: the folder.
        formats: of files for each figure, such as `svg`.
        tables: formats of files for each table, such as `csv`.

    Returns:
        The page, `run`/index.html.

    Raises:
        UserError: the folder is not a run, or cannot be read or written.
    """
    files = read(run)
    figures, groups = [*run_figures(files), *figures_of_run(files)], client_group_table(files)
    numbers = {"final": key_figures(files), "client-groups": groups}
    write_files(figures, numbers, run / FILES, formats, tables)
    page = document(
        files.name,
        template="run.html",
        run=files,
        headline=headline(files),
        measured=measured(files),
        rounds=rounds_text(files),
        results=numbers["final"],
        commands=commands(files),
        figures=figures,
        client_groups=groups,
        places=[files.client_groups.index(name) for name in groups.get("group", ())],
        environment=[
            (key, value if isinstance(value, str) else json.dumps(value))
            for key, value in flat(files.environment)
            if not key.startswith("experiment.")  # the configuration again
        ],
    )
    write_file(run / PAGE, page.encode())
    with suppress(UserError):  # the folder of the runs may be read-only
        _write_list(files)
    return run / PAGE


def commands(run: Run) -> dict[str, str]:
    """What a reader of the page can do next with a run: commands by their titles.

    They work in the directory in which the run was started, if its configuration says where that
    is; otherwise in the directory that holds the folder of the runs.
    """
    parent = _folder_of_runs(run)
    place = parent / run.folder.absolute().name
    checkpoint = place / CHECKPOINT
    written = (run.folder / CHECKPOINT).exists()
    title, command = ("Evaluate", "validate") if run.finished else ("Resume", "fit")
    found = {}

    # The checkpoint is named by its path: `last` is the newest run of this name.
    if written and "script" in run.environment:
        found[title] = f"trainer.{command}(federation, data, ckpt_path={str(checkpoint)!r})"
    elif written and run.config:
        config = str(place / "config.yaml")
        words = ["lightfed", command, "--config", config, "--ckpt_path", str(checkpoint)]
        found[title] = shlex.join(words)

    found["Compare"] = shlex.join(["lightfed", "compare", str(place), str(parent / "OTHER")])
    return found


def _folder_of_runs(run: Run) -> Path:
    """The folder of all runs, as the configuration of this one names it."""
    folder = run.folder.absolute().parent
    with suppress(yaml.YAMLError):
        configured = yaml.safe_load(run.config)
        trainer = configured.get("trainer") if isinstance(configured, dict) else None
        named = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
        if isinstance(named, str) and Path(named).name == folder.name:
            return Path(named)
    return Path(folder.name)


def print_summary(run: Path) -> None:
    """Print the tables of a run folder, and the path of its page; a UserError if it is none."""
    files = read(run)
    console = new_console()
    print_line(console, f"{files.name}: {headline(files)}")
    print_table(console, key_figures(files), left=(0, 2))
    if text := measured(files):
        print_line(console, text)
    if len(groups := client_group_table(files)):
        print_table(console, groups.drop(columns=DETAILS, errors="ignore"))
    if (run / PAGE).is_file():
        print_line(console, f"page: {run / PAGE}")


def _write_list(run: Run) -> None:
    """Write the list of all runs beside one, unless something else has written an index.html."""
    folder = run.folder.absolute().parent
    page = folder / PAGE
    if page.is_file() and OURS not in page.read_text("utf-8", "replace"):
        return
    found = {}
    for path in sorted(folder.glob("*/metrics.csv"), key=_age):
        row = _row(path.parent)
        if row is not None:
            row["changed"] = f"{datetime.fromtimestamp(-_age(path)):%Y-%m-%d %H:%M}"
            found[path.parent.name] = row
    links = [f"{name}/{PAGE}" * (folder / name / PAGE).is_file() for name in found]
    shown, title = DataFrame(found.values(), dtype="str"), f"Runs in {folder.name}"
    text = document(title, template=PAGE, ours=OURS, runs=shown, links=links)
    write_file(page, text.encode())


def _row(folder: Path) -> dict[str, str] | None:
    """A run's row in the list; None without a finished round. One that cannot be read is named."""
    try:
        with reading(folder):
            one = read(folder)
            column = primary_metric(one)
            return {
                "run": folder.name,
                "algorithm": one.algorithm,
                "data": f"{one.data}{one.note}",
                "seed": str(one.seed),
                "rounds": rounds_text(one),
                "final figure": goal_text(column, one.final(column)),
                "state": _state(one),
            }
    except NotBegun:
        return None
    except UserError as error:  # another program's folder, or a damaged one
        blank = dict.fromkeys(("algorithm", "data", "seed", "rounds", "final figure"), "")
        return {"run": folder.name, **blank, "state": f"skipped: {error.found}"}


def _state(run: Run) -> str:
    """Whether a run has finished, and whether it belongs to a search of settings."""
    state = "finished" if run.finished else "not finished"
    return f"{state}, of a search" if run.of_search else state


def _age(path: Path) -> float:
    """Seconds since a file was changed, up to a constant; 0 if it has just been removed."""
    with suppress(OSError):
        return -path.stat().st_mtime
    return 0.0
