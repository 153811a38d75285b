"""Models of `transformers` with low-rank adapters of `peft` as clients."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightfed.models.client_module import LOG_PERPLEXITY, NetworkClient
from lightfed.utils.errors import UserError, reason, require
from lightfed.utils.rng import seeded

Batch = dict[str, Tensor]  # of named columns
Task = Literal["classification", "causal"]
_IGNORED = -100  # a label that does not count


class PeftClient(NetworkClient):
    """A frozen model of `transformers`, of which a client trains LoRA adapters of its own rank.

    A batch has the columns `input_ids` and `labels`, and others that the model takes, such as
    `attention_mask`. Labels of -100 do not count. A training batch without any other label, such as
    one of texts of a single token, is skipped. Evaluation reports the loss, of classes or of
    next tokens, with the accuracy or the perplexity; all are means over the whole test set.

    What the base does not have, such as a head, is drawn alike in all groups and for all seeds.
    """

    def __init__(
        self,
        base: Callable[[], nn.Module] | str,
        rank: int | None,
        *,
        alpha: float = 16,
        task: Task = "classification",
        num_labels: int = 2,
        lora: dict[str, Any] | None = None,
    ) -> None:
        """Load the base, and add adapters.

        Args:
            base: A folder of a model of transformers; or a class, or an annotated function, of one.
            rank: r of the adapters; None for no adapters: then the whole base is trained.
            alpha: The scale of the adapters is alpha / rank, unless `lora` has use_rslora.
            task: Classification of texts, or causal, the prediction of the next token.
            num_labels: Number of classes.
            lora: Other keys of peft.LoraConfig, such as target_modules and modules_to_save.

        Raises:
            UserError: transformers or peft are missing, the base cannot be loaded, or peft cannot
                add such adapters.
        """
        fix = "give at least 1, or null for no adapters"
        require(rank is None or rank >= 1, "rank", rank, fix)
        try:
            import transformers

            transformers.logging.set_verbosity(logging.CRITICAL)  # what fails is raised, too
            transformers.logging.disable_progress_bar()
            with seeded(0), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of one package about the other
                net = _loaded(base, task, num_labels) if isinstance(base, str) else base()
                if rank is not None:
                    net = _adapted(net, task, lora or {}, r=rank, lora_alpha=alpha)
        except ImportError as error:
            fix = "pip install lightfed[hf]"
            raise UserError("base", reason(error), fix) from error
        super().__init__(net)
        self.task = task
        self.loss = MeanMetric()
        self.loss.set_dtype(torch.float64)  # float32 stops counting tokens at 2^24
        self.accuracy = MulticlassAccuracy(
            num_labels, average="micro", ignore_index=_IGNORED, validate_args=False
        )

    @override
    def forward(self, x: Any) -> Tensor:
        """(B, C) logits of classes, or (B, T, V) of next tokens."""
        logits: Tensor = self.net(**{name: c for name, c in x.items() if name != "labels"}).logits
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """The mean loss of the labels that count; None, which skips the batch, if none does."""
        logits, labels = self._predicted(batch)
        if not bool((labels != _IGNORED).any()):
            return None  # texts of a single token: the mean would be no number
        return F.cross_entropy(logits, labels, ignore_index=_IGNORED)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, labels = self._predicted(batch)
        count = (labels != _IGNORED).sum()
        total = F.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
        self.loss.update(total / count.clamp(min=1), weight=count)
        self.log("loss", self.loss)
        if self.task == "causal":
            self.log(LOG_PERPLEXITY, self.loss)
        else:
            self.accuracy.update(logits, labels)
            self.log("accuracy", self.accuracy)

    def _predicted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(N, C) logits and (N,) labels, of samples or of the tokens after the first."""
        logits, labels = self(batch), batch["labels"]
        if self.task == "causal":
            return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return logits, labels

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters for `peft.PeftModel.from_pretrained`; without any, the whole model."""
        self.net.save_pretrained(folder)  # type: ignore[operator]


def _loaded(base: str, task: Task, num_labels: int) -> nn.Module:
    """The model in a folder."""
    import transformers

    folder = Path(base).expanduser()
    fix = "name a folder with config.json and weights, or a function -> nn.Module that makes it"
    require((folder / "config.json").is_file(), "base", f"{base} is no folder of a model", fix)
    try:
        if task == "causal":
            return transformers.AutoModelForCausalLM.from_pretrained(folder)
        kind = transformers.AutoModelForSequenceClassification
        return kind.from_pretrained(folder, num_labels=num_labels)
    except Exception as error:  # of files of others
        raise UserError("base", f"{base} cannot be loaded ({reason(error)})", fix) from error


def _adapted(net: nn.Module, task: Task, lora: dict[str, Any], **own: Any) -> nn.Module:
    """A model with adapters; `own` are peft's keys for `rank` and `alpha`."""
    from peft import LoraConfig, get_peft_model

    require(isinstance(lora, dict), "lora", lora, "give keys of peft.LoraConfig and their values")
    for theirs, ours in _OURS.items():
        fix = f"leave it out; the client's {ours} says it"
        require(theirs not in lora, f"lora.{theirs}", lora.get(theirs), fix)

    kind = "CAUSAL_LM" if task == "causal" else "SEQ_CLS"
    try:
        config = LoraConfig(task_type=kind, **own, **_with_names(lora))
        return get_peft_model(net, config)
    except Exception as error:  # peft checks some values, and stumbles over others
        raise UserError("lora", reason(error), "correct it; see peft.LoraConfig") from error


# Keys of peft.LoraConfig that are arguments of the client.
_OURS = {"r": "rank", "lora_alpha": "alpha", "task_type": "task"}
_NAMES = ("target_modules", "exclude_modules", "modules_to_save")


def _with_names(lora: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration, with layers such as 0 of a Sequential by their names."""
    found = dict(lora)
    for key in _NAMES:
        value = found.get(key)
        if isinstance(value, int):
            value = [value]
        if isinstance(value, list | tuple | set):
            found[key] = [str(name) if isinstance(name, int) else name for name in value]
    return found
