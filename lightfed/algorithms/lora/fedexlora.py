"""FedEx-LoRA: adapters get the mean of the factors, and the base what that mean lacks.

Singhal, Ponkshe, Vepakomma: FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning
of Foundation Models. ACL 2025. https://arxiv.org/abs/2410.09432

    A, D <- means of the clients' factors
    W <- W + E,   E = sum_k p_k s_k B_k A_k - D A

Deviations: clients are weighted by samples and can have unlike ranks; the paper has uniform weights
and one rank. A client of lower rank starts from the new W and its own ranks. It lacks the other
ranks, although the residual E assumes that they are there. The released code adds the residual
transposed, which is right for GPT-2 only.
"""

from typing_extensions import override

from lightfed.algorithms.lora.adapter_rule import AdapterRule, Merged, Sent
from lightfed.algorithms.lora.products import Product


class FedExLoRA(AdapterRule):
    """W + D A = W_old + sum_k p_k s_k B_k A_k: the server's model is exact."""

    no_late = "the base changes, and an update that is under way is without it"
    changes_base = True
    no_memory = "the base changes, and what a client remembers is without it"
    no_server_step = "its step would be one of dense weights"

    @override
    def merge_layer(self, sent: Sent) -> Merged:
        A, D = sent.averaged(sent.p, by_rank=True)
        DA = Product(D, A)
        E = sent.mean - DA
        return Merged(applied=DA, A=A, D=D, base=E)  # W <- W + E
