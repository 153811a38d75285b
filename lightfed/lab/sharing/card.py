"""The model card of a shared model: README.md with the metadata that the hub reads."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from lightfed.lab.results import text
from lightfed.lab.results.run import TIME, totals
from lightfed.lab.sharing.loading import snippet
from lightfed.lab.sharing.shared_model import Metric, SharedModel
from lightfed.utils.record import version_of

# A list in a card has at most so many items.
_MOST_LISTED = 20


class Given(NamedTuple):
    """What a user says of a model that its run does not know.

    Attributes:
        license: The license, by its name on the hub; None if the user has named none.
        base: The name of an adapter's base on the hub; None to share the base, too.
        dataset: The name of the data set on the hub; None if the user has named none.
    """

    license: str | None = None
    base: str | None = None
    dataset: str | None = None


def card(model: SharedModel, given: Given) -> str:
    """Return the text of a model card."""
    head = yaml.safe_dump(metadata(model, given), sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n{_body(model, given)}"


# Metadata.


def metadata(model: SharedModel, given: Given) -> dict[str, Any]:
    """Return the metadata of a card, with the names that the hub gives them."""
    run = model.run
    found: dict[str, Any] = {}
    if given.license is not None:
        found["license"] = given.license
    found["library_name"] = _library(model)
    if model.task != "other":
        found["pipeline_tag"] = model.task

    found["tags"] = ["lightfed", "federated-learning", run.algorithm.lower()]
    if given.base is not None:
        found["base_model"] = given.base
    dataset = given.dataset or model.data_on_hub
    if dataset:
        found["datasets"] = [dataset]

    names = list(dict.fromkeys(metric.name for metric in model.metrics))
    if names:
        found["metrics"] = names
        found["model-index"] = [{"name": _title(model), "results": _results(model, dataset)}]
    return found


def _library(model: SharedModel) -> str:
    if model.is_adapter:
        return "peft"
    return "lightfed" if model.adapter is None else "transformers"


def _results(model: SharedModel, dataset: str) -> list[dict[str, Any]]:
    """Return the results of a card's `model-index`: one for each set of test samples."""
    metrics_of: dict[str, list[dict[str, Any]]] = {}
    for metric in model.metrics:
        written = {"type": metric.name, "value": metric.value, "name": _metric_name(model, metric)}
        metrics_of.setdefault(metric.of, []).append(written)

    results = []
    for of, metrics in metrics_of.items():
        results.append(
            {
                "task": {"type": model.task},
                "dataset": {
                    "type": dataset or model.run.data.lower(),
                    "name": f"{model.run.data}: {of}",
                    "split": "test",
                },
                "metrics": metrics,
            }
        )
    return results


def _metric_name(model: SharedModel, metric: Metric) -> str:
    """Return the name of a metric, with the mean over the seeds if there are several."""
    name = text.readable(metric.name)
    if math.isnan(metric.mean):
        return name
    mean = text.metric_text(metric.name, metric.mean, metric.half)
    return f"{name} (mean of seeds {_seeds(model)}: {mean}, 95 % interval)"


# Text.


def _title(model: SharedModel) -> str:
    return f"{model.run.name}-{model.name}"


def _seeds(model: SharedModel) -> str:
    return text.seeds_text(sorted(run.seed for run in model.runs if run.seed is not None))


def _body(model: SharedModel, given: Given) -> str:
    sections = [
        f"# {_title(model)}",
        _summary(model),
        "## How to load it",
        snippet(model, base=given.base),
        *_evaluation(model),
        "## How it was trained",
        _table([("", ""), *_training(model)]),
        "## What it cost",
        _table([("", ""), *_costs(model)]),
        "Costs are those of the method over the whole run and all clients, not of the machine, but "
        "for the seconds.",
        "## Where it comes from",
        f"{version_of(model.run.environment)}, torch {_torch(model)}.",
    ]
    if model.command:
        sections.append(f"```sh\n{model.command}\n```")
    return "\n\n".join(sections) + "\n"


def _torch(model: SharedModel) -> str:
    return str(model.run.environment.get("torch", "unknown"))


def _summary(model: SharedModel) -> str:
    """Return what the model is, in two sentences."""
    run = model.run
    whose = model.description
    clients = "clients" if run.num_clients is None else text.counted(run.num_clients, "client")
    sentences = [
        f"This is {whose} of a federation of {clients}, trained with {run.algorithm} on "
        f"{run.data}{run.note} by lightfed."
    ]
    method = model.method
    if method.paper:
        sentences.append(f"The method: {method.paper}")
    elif method.summary:
        sentences.append(f"The method: {method.summary}")
    return "\n\n".join(sentences)


def _evaluation(model: SharedModel) -> Iterator[str]:
    """Yield the section with the metrics, if there are any."""
    metrics = model.metrics
    if not metrics:
        return

    yield "## Evaluation"
    several = len(model.runs) > 1
    heads = ["metric", "tested on", f"this model (seed {model.run.seed})"]
    if several:
        heads.append(f"mean of seeds {_seeds(model)}")
    rows = [heads]
    for metric in metrics:
        row = [text.readable(metric.name), metric.of, text.metric_text(metric.name, metric.value)]
        if several:
            row.append(text.metric_text(metric.name, metric.mean, metric.half))
        rows.append(row)
    yield _table(rows)

    if several and any(not math.isnan(metric.mean) for metric in metrics):
        yield "Intervals are 95 % t intervals of the mean over the seeds."
    yield "All values are those after the last round, on test samples."


def _training(model: SharedModel) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table about training."""
    run = model.run
    summary = model.method.summary
    yield "method", summary if run.algorithm in summary else f"{run.algorithm}. {summary}".strip()
    yield "data", f"{run.data}{run.note}"
    yield "partition", f"{model.partition}, seed {run.seed}"
    yield from _inputs(model)
    yield "clients", _clients(model)

    planned = "" if run.planned in (None, run.last_round) else f" of {run.planned}"
    yield "rounds", f"{run.last_round}{planned}"
    if run.environment.get("precision"):
        yield "precision", str(run.environment["precision"])


def _inputs(model: SharedModel) -> Iterator[tuple[str, str]]:
    """Yield what the network takes."""
    inputs = model.inputs
    if inputs.get("shape"):
        yield "shape of a sample", str(tuple(inputs["shape"]))
    if inputs.get("mean") is not None:
        values = f"mean {inputs['mean']}, deviation {inputs['std']}"
        yield "standardized by channel", f"{values}; images of type uint8 are divided by 255 before"
    classes = inputs.get("classes") or []
    if classes:
        yield "classes", _listed([str(name) for name in classes])


def _clients(model: SharedModel) -> str:
    """Return how many clients have which architecture."""
    run = model.run
    sizes = run.environment.get("parameters") or {}
    groups = []
    for name, count in run.group_sizes.items():
        size = f" of {sizes[name]:,.0f} trained parameters" if name in sizes else ""
        groups.append(f"{name}: {text.counted(count, 'client')}{size}")
    if not groups:
        return "not known" if run.num_clients is None else str(run.num_clients)
    return f"{run.num_clients}, by group: {_listed(groups, '; ')}"


def _costs(model: SharedModel) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table about costs."""
    costs = totals(model.run)
    yield "sent by clients", text.bytes_text(costs["bytes_up"])
    yield "sent to clients", text.bytes_text(costs["bytes_down"])
    if math.isfinite(costs["server_bytes"]):
        yield "sent between servers", text.bytes_text(costs["server_bytes"])
    yield "computed by clients", text.flops_text(costs["flops"])
    yield "seconds on the machine of the run", text.seconds_text(costs["seconds"])

    virtual = model.run.final(TIME)
    if math.isfinite(virtual):
        yield "virtual time of the devices", text.seconds_text(virtual)


def _listed(items: Sequence[str], between: str = ", ") -> str:
    """Return items as text; of very many, the first ones and how many there are."""
    if len(items) <= _MOST_LISTED:
        return between.join(items)
    return f"{between.join(items[:_MOST_LISTED])} and {len(items) - _MOST_LISTED} more"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown; the first row has the heads."""
    lines = []
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)
