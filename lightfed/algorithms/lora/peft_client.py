"""Models of `transformers` with low-rank adapters of `peft` as clients."""

import logging
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightfed.algorithms.lora.base_type import (
    DType,
    Quantization,
    check_dtype,
    dtype_to_load,
    in_type,
    quantize,
    train_in_float32,
)
from lightfed.algorithms.lora.plain_peft import save_adapters
from lightfed.models.client_module import LOG_PERPLEXITY, NetworkClient
from lightfed.utils.errors import UserError, reason
from lightfed.utils.rng import seeded

Batch = dict[str, Tensor]  # columns by name
Task = Literal["classification", "causal"]

# A label that does not count.
_IGNORED = -100

# Keys of peft.LoraConfig that the client sets, and what says so.
_OURS = {
    "r": "the client's rank sets it",
    "lora_alpha": "the client's alpha sets it",
    "task_type": "the client's task sets it",
    "base_model_name_or_path": "the client's base sets it",
    "revision": "the client's base sets it",
    "peft_type": "the adapters are those of LoRA",
    "inference_mode": "a client trains",
}

# Values of init_lora_weights that need a pass over data, which nobody makes here.
_FROM_DATA = ("eva", "corda", "lora_ga")

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
        dtype: DType | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Load the base, and add adapters.

        The adapters, a head and the loss are float32, whatever the base is held in.

        Args:
            base: A folder with a model of transformers; or a class or an annotated function that
                makes one.
            rank: r of the adapters; None for no adapters, in which case the whole base is trained.
            alpha: The scale of the adapters is alpha / rank, unless `lora` has use_rslora.
            task: "classification" of texts, or "causal", the prediction of the next token.
            num_labels: Number of classes.
            lora: Other keys of peft.LoraConfig, such as target_modules and modules_to_save.
            dtype: What the base is held in: "float32", "bfloat16", or "auto" for the type that its
                files have. By default a folder is loaded as float32, and what a function makes
                stays as it is.
            quantization: "int8" holds the weights of linear layers, but not of the output layer, in
                8 bits, by torchao (the extra `quant`). The rest has the type `dtype`.

        Raises:
            UserError: A package is missing, the base cannot be loaded or held so, or peft cannot
                add such adapters.
        """
        if rank is not None and rank < 1:
            raise UserError("rank", str(rank), "give at least 1, or null for no adapters")
        if not isinstance(lora or {}, dict):
            raise UserError("lora", str(lora), "give keys of peft.LoraConfig and their values")
        check_dtype(dtype, quantization, rank)

        try:
            import transformers

            transformers.logging.set_verbosity(logging.CRITICAL)  # what fails is raised, too
            transformers.logging.disable_progress_bar()
            with seeded(0), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # one package warns of the other
                # peft warns that it could not merge adapters into an int8 weight. Nobody does here.
                warnings.filterwarnings("ignore", message=".*get_apply_tensor_subclass")
                if isinstance(base, str):
                    net = _loaded(base, task, num_labels, dtype_to_load(dtype))
                else:
                    net = base()
                net = in_type(net, dtype, is_trained=rank is None)
                if quantization is not None:
                    quantize(net, _trained_layers(task, lora or {}))
                if rank is not None:
                    net = _adapted(net, task, lora or {}, r=rank, lora_alpha=alpha)
                    train_in_float32(net)
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
        # A loss in 16 bits would have two digits.
        return logits.float()

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


def _loaded(base: str, task: Task, num_labels: int, dtype: torch.dtype | str) -> nn.Module:
    """Return the model in a folder.

    Args:
        base: The folder.
        task: What it is trained for.
        num_labels: Number of classes.
        dtype: Type of its parameters; "auto" for that of its files.

    Raises:
        UserError: It is not the folder of a model, or the model cannot be loaded.
    """
    import transformers

    folder = Path(base).expanduser()
    fix = "name a folder with config.json and weights, or a function -> nn.Module that makes it"
    if not (folder / "config.json").is_file():
        raise UserError("base", f"{base} is not the folder of a model", fix)

    # The argument was renamed in transformers 4.56.
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    options: dict[str, Any] = {"dtype" if version >= (4, 56) else "torch_dtype": dtype}
    try:
        if task == "causal":
            return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
        kind = transformers.AutoModelForSequenceClassification
        return kind.from_pretrained(folder, num_labels=num_labels, **options)
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

    for key, reason_of_key in _OURS.items():
        if key in lora:
            raise UserError(f"lora.{key}", str(lora[key]), f"remove it: {reason_of_key}")
    if lora.get("init_lora_weights") in _FROM_DATA:
        raise UserError(
            "lora.init_lora_weights",
            f"{lora['init_lora_weights']}, which needs a pass over data before training",
            "give another one, such as true",
        )

    kind = "CAUSAL_LM" if task == "causal" else "SEQ_CLS"
    try:
        keys = _with_configurations(_with_names(lora), LoraConfig)
        config = LoraConfig(task_type=kind, **own, **keys)
        return get_peft_model(net, config)
    except Exception as error:  # peft checks some values, and fails with others
        raise UserError("lora", reason(error), "correct it; see peft.LoraConfig") from error


def _with_configurations(lora: dict[str, Any], config: type) -> dict[str, Any]:
    """Return keys in which a dict is the configuration that the key takes.

    peft makes some of them itself, of a dict that it has written.
    """
    hints = get_type_hints(config)
    made = dict(lora)
    for key, value in lora.items():
        kinds = get_args(hints.get(key)) or (hints.get(key),)
        classes = [kind for kind in kinds if is_dataclass(kind) and isinstance(kind, type)]
        if isinstance(value, dict) and dict not in kinds and classes:
            made[key] = classes[0](**value)
    return made


def _trained_layers(task: Task, lora: dict[str, Any]) -> list[str]:
    """Return the names of the layers of which peft will make a trained copy."""
    names = _with_names(lora).get("modules_to_save") or []
    layers = [names] if isinstance(names, str) else list(names)
    if task == "classification":
        layers += ["classifier", "score"]  # peft adds these two by itself
    return layers


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
