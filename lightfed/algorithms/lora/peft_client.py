"""Models of `transformers` with low-rank adapters of `peft` as clients."""

import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightfed.algorithms.lora.plain_peft import save_adapters
from lightfed.models.client_module import LOG_PERPLEXITY, NetworkClient
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import seeded

Batch = dict[str, Tensor]  # columns by name
Task = Literal["classification", "causal"]

# A label that does not count.
_IGNORED = -100

# Keys of peft.LoraConfig that are arguments of the client, and the names of these arguments.
_ARGUMENTS = {"r": "rank", "lora_alpha": "alpha", "task_type": "task"}

# Keys of peft.LoraConfig that name layers.
_NAMES = ("target_modules", "exclude_modules", "modules_to_save")


class PeftClient(NetworkClient):
    """A frozen model of `transformers` with LoRA adapters, which a client trains at its own rank.

    A batch has the columns `input_ids` and `labels`, and others that the model takes, such as
    `attention_mask`. Labels of -100 do not count. A training batch without any other label, such as
    one of texts of a single token, is skipped. Evaluation reports the loss, of classes or of next
    tokens, with the accuracy or the perplexity. All are means over the whole test set.

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
            base: A folder with a model of transformers; or a class or an annotated function that
                makes one.
            rank: r of the adapters; None for no adapters, in which case the whole base is trained.
            alpha: The scale of the adapters is alpha / rank, unless `lora` has use_rslora.
            task: "classification" of texts, or "causal", the prediction of the next token.
            num_labels: Number of classes.
            lora: Other keys of peft.LoraConfig, such as target_modules and modules_to_save.

        Raises:
            UserError: transformers or peft are missing, the base cannot be loaded, or peft cannot
                add such adapters.
        """
        if rank is not None and rank < 1:
            raise UserError("rank", str(rank), "give at least 1, or null for no adapters")

        try:
            import transformers

            transformers.logging.set_verbosity(logging.CRITICAL)  # what fails is raised, too
            transformers.logging.disable_progress_bar()
            with seeded(0), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # one package warns of the other
                net = _loaded(base, task, num_labels) if isinstance(base, str) else base()
                if rank is not None:
                    net = _adapted(net, task, lora or {}, r=rank, lora_alpha=alpha)
        except ImportError as error:
            raise UserError("base", reason(error), "pip install transformers peft") from error

        super().__init__(net)
        self.task = task
        self.loss = MeanMetric()
        self.loss.set_dtype(torch.float64)  # float32 stops counting tokens at 2^24
        self.accuracy = MulticlassAccuracy(
            num_labels, average="micro", ignore_index=_IGNORED, validate_args=False
        )

    @override
    def forward(self, x: Any) -> Tensor:
        """Return logits of classes, (B, C), or of next tokens, (B, T, V)."""
        # Without the labels, with which the model would compute a loss of its own.
        columns = {name: column for name, column in x.items() if name != "labels"}
        logits: Tensor = self.net(**columns).logits
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Return the mean loss of the labels that count; None if none does, to skip the batch."""
        logits, labels = self._predicted(batch)
        if not bool((labels != _IGNORED).any()):
            return None  # the mean would be NaN
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
        """Return logits (N, C) and labels (N,), of samples or of the tokens after the first."""
        logits = self(batch)
        labels = batch["labels"]
        if self.task == "causal":
            return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return logits, labels

    def export_adapter(self, folder: Path) -> None:
        """Write the adapters for `peft.PeftModel.from_pretrained`; without any, the whole model.

        Beside adapters, `base/config.json` is the configuration of the model below them.
        """
        net: Any = self.net
        save_adapters(net, folder)
        if hasattr(net, "get_base_model"):
            base = net.get_base_model()
            # transformers adds the class when it writes a whole model, and finds it by that.
            config = deepcopy(base.config)
            config.architectures = [type(base).__name__]
            config.save_pretrained(folder / "base")


def _loaded(base: str, task: Task, num_labels: int) -> nn.Module:
    """Return the model in a folder.

    Raises:
        UserError: It is not the folder of a model, or the model cannot be loaded.
    """
    import transformers

    folder = Path(base).expanduser()
    fix = "name a folder with config.json and weights, or a function -> nn.Module that makes it"
    if not (folder / "config.json").is_file():
        raise UserError("base", f"{base} is not the folder of a model", fix)

    try:
        if task == "causal":
            return transformers.AutoModelForCausalLM.from_pretrained(folder)
        kind = transformers.AutoModelForSequenceClassification
        return kind.from_pretrained(folder, num_labels=num_labels)
    except Exception as error:  # a damaged file can raise anything
        raise UserError("base", f"{base} cannot be loaded ({reason(error)})", fix) from error


def _adapted(net: nn.Module, task: Task, lora: dict[str, Any], **own: Any) -> nn.Module:
    """Return a model with adapters.

    Args:
        net: The model.
        task: What it is trained for.
        lora: Keys of peft.LoraConfig that the user gives.
        **own: Its keys for the client's rank and alpha.

    Raises:
        UserError: peft does not accept the keys, or the user gives one that the client sets.
    """
    from peft import LoraConfig, get_peft_model

    if not isinstance(lora, dict):
        raise UserError("lora", str(lora), "give keys of peft.LoraConfig and their values")
    for key, argument in _ARGUMENTS.items():
        if key in lora:
            raise UserError(
                f"lora.{key}",
                str(lora[key]),
                f"remove it: the client's {argument} sets it",
            )

    kind = "CAUSAL_LM" if task == "causal" else "SEQ_CLS"
    try:
        config = LoraConfig(task_type=kind, **own, **_with_names(lora))
        return get_peft_model(net, config)
    except Exception as error:  # peft checks some values, and fails with others
        raise UserError("lora", reason(error), "correct it; see peft.LoraConfig") from error


def _with_names(lora: dict[str, Any]) -> dict[str, Any]:
    """Return keys of peft.LoraConfig in which layers are named by text.

    YAML reads the name of a layer of a Sequential, such as 0, as a number.
    """
    named = dict(lora)
    for key in _NAMES:
        layers = named.get(key)
        if isinstance(layers, int):
            layers = [layers]
        if isinstance(layers, list | tuple | set):
            named[key] = [str(layer) if isinstance(layer, int) else layer for layer in layers]
    return named
