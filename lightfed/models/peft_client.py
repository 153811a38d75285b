"""Models of `transformers` with low-rank adapters of `peft` as clients."""

import logging
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightfed.models.client_module import LOG_PERPLEXITY, NetworkClient
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import seeded

Columns: TypeAlias = dict[str, Tensor]
LMTask: TypeAlias = Literal["classification", "causal"]

_AUTO = {
    "classification": ("AutoModelForSequenceClassification", "SEQ_CLS"),
    "causal": ("AutoModelForCausalLM", "CAUSAL_LM"),
}  # the class of transformers, and the task type of peft
_OWN = {"r": "rank", "lora_alpha": "alpha", "task_type": "task"}  # keys of peft -> ours


class PeftClient(NetworkClient):
    """A frozen model of `transformers`, of which a client trains LoRA adapters of its own rank.

    A batch has the columns `input_ids` and `labels`, and others that the model takes, such as
    `attention_mask`. Labels of -100 do not count. Evaluation reports the loss, of classes or of
    next tokens, with the accuracy or the perplexity; all are means over the whole test set.

    What the base does not have, such as a head, is drawn alike in all groups and for all seeds.
    """

    def __init__(
        self,
        base: Callable[[], nn.Module] | str,
        rank: int | None,
        *,
        alpha: float = 16,
        task: LMTask = "classification",
        num_labels: int = 2,
        lora: dict[str, Any] | None = None,
    ) -> None:
        """Load the base, and add adapters.

        Args:
            base: A folder of a model of transformers, or a class or function that makes one.
            rank: r of the adapters; None for no adapters: then the whole base is trained.
            alpha: The scale of the adapters is alpha / rank.
            task: Classification of texts, or causal, the prediction of the next token.
            num_labels: Classes of a classification, of a base in a folder.
            lora: Other keys of peft.LoraConfig, such as target_modules and modules_to_save.

        Raises:
            UserError: transformers or peft are missing, the base cannot be loaded, or peft cannot
                add such adapters.
        """
        require(rank is None or rank >= 1, "rank", rank, "give at least 1")
        with seeded(0):
            net = _loaded(base, task, num_labels)
            if rank is not None:
                net = _adapted(net, rank, alpha, task, lora or {})
        super().__init__(net)
        self.task = task
        self.loss = MeanMetric()
        self.accuracy = MulticlassAccuracy(num_labels, average="micro", validate_args=False)

    @override
    def forward(self, x: Any) -> Tensor:
        """(B, C) logits of classes, or (B, T, V) of next tokens."""
        logits: Tensor = self.net(**{name: c for name, c in x.items() if name != "labels"}).logits
        return logits

    @override
    def training_step(self, batch: Columns, batch_idx: int) -> Tensor:
        return F.cross_entropy(*self._predicted(batch))

    @override
    def validation_step(self, batch: Columns, batch_idx: int) -> None:
        logits, labels = self._predicted(batch)
        self.loss.update(F.cross_entropy(logits, labels), weight=(labels != -100).sum())
        self.log("loss", self.loss)
        if self.task == "causal":
            self.log(LOG_PERPLEXITY, self.loss)
        else:
            self.accuracy.update(logits, labels)
            self.log("accuracy", self.accuracy)

    def _predicted(self, batch: Columns) -> tuple[Tensor, Tensor]:
        """(N, C) logits and (N,) labels, of samples or of the tokens after the first."""
        logits, labels = self(batch), batch["labels"]
        if self.task == "causal":
            return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return logits, labels

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters for `peft.PeftModel.from_pretrained`; without any, the whole model."""
        self.net.save_pretrained(folder)  # type: ignore[operator]


def _loaded(base: Callable[[], nn.Module] | str, task: LMTask, num_labels: int) -> nn.Module:
    """The model of a folder or function."""
    transformers = _imported("transformers", "base")
    transformers.logging.set_verbosity(logging.CRITICAL)  # what fails is raised, too
    transformers.logging.disable_progress_bar()
    if not isinstance(base, str):
        return base()
    folder = Path(base).expanduser()
    fix = "name a folder with config.json and weights, or a function that makes a model"
    require((folder / "config.json").is_file(), "base", f"{base} is no folder of a model", fix)
    labels = {"num_labels": num_labels} if task == "classification" else {}
    try:
        net: nn.Module = getattr(transformers, _AUTO[task][0]).from_pretrained(folder, **labels)
    except Exception as error:  # of files of others
        raise UserError("base", f"{base} cannot be loaded ({reason(error)})", fix) from error
    return net


def _adapted(
    net: nn.Module, rank: int, alpha: float, task: LMTask, lora: dict[str, Any]
) -> nn.Module:
    """A model with adapters."""
    peft = _imported("peft", "rank")
    known = {field.name for field in fields(peft.LoraConfig)}
    for name, value in lora.items():
        fix = f"give {_OWN.get(name, 'keys of peft.LoraConfig')} instead"
        require(name in known - _OWN.keys(), f"lora.{name}", value, fix)
    found = "true, so that an update is not s B A"
    require(not lora.get("use_dora"), "lora.use_dora", found, "leave it out")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, task_type=_AUTO[task][1], **lora)
    adapted: nn.Module = peft.get_peft_model(net, config)
    return adapted


def _imported(name: str, key: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(key, f"{name} is not installed", "pip install lightfed[hf]") from error
