"""The page of a run, index.html in its folder, and the list of the runs beside it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pandas import DataFrame

from lightfed.lab.drawing.files import write_file, write_files
from lightfed.lab.drawing.markup import document
from lightfed.lab.drawing.summary import new_console, print_line, print_table
from lightfed.lab.report.figures import run_figures
from lightfed.lab.report.sentence import result_sentence
from lightfed.lab.report.tables import (
    client_group_table,
    headline,
    key_figures,
    measured,
    rounds_text,
)
from lightfed.lab.results.run import NotBegun, Run, primary_metric, read, reading, totals
from lightfed.lab.results.text import goal_text
from lightfed.lab.studies.figures import figures_of_run
from lightfed.utils.errors import UserError
from lightfed.utils.keys import flat

PAGE = "index.html"

# Columns of the table of client groups that only the page has.
DETAILS = ["std over clients", "down / client", "stored / client"]

# In the folder of a run: its checkpoint, and the figures and tables that were asked for.
CHECKPOINT = Path("checkpoints", "last.ckpt")
FILES = "report"

# Words by which the list of runs is known, so that no other index.html is replaced.
OURS = "list of lightfed runs"


def build(run: Path, *, formats: Sequence[str] = (), tables: Sequence[str] = ()) -> Path:
    """Make the page of a run folder, finished or not, and the list of the runs beside it.

    Args:
        run: The folder.
        formats: The formats of files for each figure, such as `svg`.
        tables: The formats of files for each table, such as `csv`.

    Returns:
        The page, `run`/index.html.

    Raises:
        UserError: The folder is not a run, or cannot be read or written.
    """
    files = read(run)
    figures = [*run_figures(files), *figures_of_run(files)]
    finals = key_figures(files)
    groups = client_group_table(files)
    tables_by_name = {"final": finals, "client-groups": groups}
    write_files(figures, tables_by_name, run / FILES, formats, tables)

    environment = []
    for key, value in flat(files.environment):
        # The experiment is the configuration once more.
        if not key.startswith("experiment."):
            environment.append((key, value if isinstance(value, str) else json.dumps(value)))

    page = document(
        files.name,
        template="run.html",
        run=files,
        sentence=f"{result_sentence(files)}.",
        headline=headline(files),
        measured=measured(files),
        rounds=rounds_text(files),
        results=finals,
        commands=commands(files),
        figures=figures,
        client_groups=groups,
        places=[files.client_groups.index(name) for name in groups.get("group", ())],
        environment=environment,
    )
    write_file(run / PAGE, page.encode())

    # The folder of the runs can be read-only.
    with suppress(UserError):
        _write_list(files)
    return run / PAGE


def commands(run: Run) -> dict[str, str]:
    """Return what a reader of the page can do next with a run: commands by their titles.

    They work in the directory in which the run was started, if its configuration says where that
    is. Otherwise they work in the directory that holds the folder of the runs.
    """
    folder_of_runs = _folder_of_runs(run)
    folder = folder_of_runs / run.folder.absolute().name
    checkpoint = str(folder / CHECKPOINT)
    has_checkpoint = (run.folder / CHECKPOINT).exists()

    if run.finished:
        title = "Evaluate"
        command = "validate"
    else:
        title = "Resume"
        command = "fit"

    command_of_title = {}
    # The checkpoint is named by its path, because `last` is the newest run of this name.
    if has_checkpoint and "script" in run.environment:
        call = f"trainer.{command}(federation, data, ckpt_path={checkpoint!r})"
        command_of_title[title] = call
    elif has_checkpoint and run.config:
        config = str(folder / "config.yaml")
        words = ["lightfed", command, "--config", config, "--ckpt_path", checkpoint]
        command_of_title[title] = shlex.join(words)

    other = str(folder_of_runs / "OTHER")
    command_of_title["Compare"] = shlex.join(["lightfed", "compare", str(folder), other])
    return command_of_title


def _folder_of_runs(run: Run) -> Path:
    """Return the folder of all runs, as the configuration of one of them names it."""
    folder = run.folder.absolute().parent
    with suppress(yaml.YAMLError):
        configuration = yaml.safe_load(run.config)
        trainer = configuration.get("trainer") if isinstance(configuration, dict) else None
        name = trainer.get("default_root_dir") if isinstance(trainer, dict) else None
        if isinstance(name, str) and Path(name).name == folder.name:
            return Path(name)
    return Path(folder.name)


def print_summary(run: Path) -> None:
    """Print the tables of a run folder, and the path of its page.

    Raises:
        UserError: The folder is not a run.
    """
    files = read(run)
    console = new_console()
    print_line(console, f"{files.name}: {headline(files)}")
    print_table(console, key_figures(files), left=(0, 2))

    explanation = measured(files)
    if explanation:
        print_line(console, explanation)

    groups = client_group_table(files)
    if not groups.empty:
        print_table(console, groups.drop(columns=DETAILS, errors="ignore"))

    if (run / PAGE).is_file():
        print_line(console, f"page: {run / PAGE}")


def numbers(run: Run) -> dict[str, Any]:
    """Return the final values of a run for a program, as values for JSON.

    A value that is unknown or not finite is None.
    """
    metrics = {}
    for column in run.metrics:
        best, best_round = run.best(column)
        metrics[column] = {
            "last": _known(run.final(column)),
            "best": _known(best),
            "best_round": best_round or None,
        }

    page = run.folder / PAGE
    return {
        "run": str(run.folder),
        "algorithm": run.algorithm,
        "data": run.data,
        "seed": run.seed,
        "clients": run.num_clients,
        "groups": dict(run.group_sizes),
        "rounds": run.last_round,
        "planned": run.planned,
        "finished": run.finished,
        "primary": primary_metric(run),
        "metrics": metrics,
        "costs": {name: _known(cost) for name, cost in totals(run).items()},
        "page": str(page) if page.is_file() else None,
        "commit": run.environment.get("commit"),
    }


def _known(value: float) -> float | None:
    """Return a value for JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _write_list(run: Run) -> None:
    """Write the list of all runs beside one, unless something else has written an index.html."""
    folder = run.folder.absolute().parent
    page = folder / PAGE
    is_other_page = page.is_file() and OURS not in page.read_text("utf-8", "replace")
    if is_other_page:
        return

    rows = []
    links = []
    for path in sorted(folder.glob("*/metrics.csv"), key=_time_of_change, reverse=True):
        row = _row(path.parent)
        if row is None:
            continue
        row["changed"] = f"{datetime.fromtimestamp(_time_of_change(path)):%Y-%m-%d %H:%M}"
        rows.append(row)

        has_page = (path.parent / PAGE).is_file()
        links.append(f"{path.parent.name}/{PAGE}" if has_page else "")

    text = document(
        f"Runs in {folder.name}",
        template=PAGE,
        ours=OURS,
        runs=DataFrame(rows, dtype="str"),
        links=links,
    )
    write_file(page, text.encode())


def _row(folder: Path) -> dict[str, str] | None:
    """Return the row of a run in the list.

    Returns:
        The row, which says so if the run cannot be read. None if it has no finished round.
    """
    try:
        with reading(folder):
            run = read(folder)
            column = primary_metric(run)
            return {
                "run": folder.name,
                "algorithm": run.algorithm,
                "data": f"{run.data}{run.note}",
                "seed": str(run.seed),
                "rounds": rounds_text(run),
                "final figure": goal_text(column, run.final(column)),
                "state": _state(run),
            }
    except NotBegun:
        return None
    except UserError as error:
        # The folder belongs to another program, or is damaged.
        blank = dict.fromkeys(("algorithm", "data", "seed", "rounds", "final figure"), "")
        return {"run": folder.name, **blank, "state": f"skipped: {error.found}"}


def _state(run: Run) -> str:
    """Return whether a run has finished, and whether it belongs to a search of settings."""
    state = "finished" if run.finished else "not finished"
    return f"{state}, of a search" if run.of_search else state


def _time_of_change(path: Path) -> float:
    """Return when a file was changed, in seconds; 0 if it has just been removed."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
