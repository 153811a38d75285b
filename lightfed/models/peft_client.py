"""Models of `transformers` with low-rank adapters of `peft` as clients."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

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
        self.accuracy = MulticlassAccuracy(
            num_labels, average="micro", ignore_index=-100, validate_args=False
        )

    @override
    def forward(self, x: Any) -> Tensor:
        """(B, C) logits of classes, or (B, T, V) of next tokens."""
        logits: Tensor = self.net(**{name: c for name, c in x.items() if name != "labels"}).logits
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(*self._predicted(batch))

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits, labels = self._predicted(batch)
        self.loss.update(F.cross_entropy(logits, labels), weight=(labels != -100).sum())
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

    kind = "CAUSAL_LM" if task == "causal" else "SEQ_CLS"
    return get_peft_model(net, LoraConfig(task_type=kind, **own, **lora))
