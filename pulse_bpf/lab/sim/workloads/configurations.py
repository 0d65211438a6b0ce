"""Published model configurations, and what training them costs: parameters, FLOPs, GPU time.

A job's proportions (compute to communication, message sizes, layers per stage) come from these; nothing of a
model but its shape matters to the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pulse_bpf.errors import UsageError

# What a GPU achieves in matrix multiplications of bf16, per nanosecond: about 40 % of an H100's 989 TFLOP/s,
# the share that Megatron-LM's own scaling results on H100 state (41 to 48 %).
FLOP_PER_NS = 400e3
# Adam reads and writes parameter, gradient and both moments (28 bytes a parameter in fp32) at memory speed.
OPTIMIZER_BYTES, MEMORY_BYTES_PER_NS = 28, 3000.0
# Compute of an iteration that an unscaled Size aims at: short enough that a second shows several iterations.
LAB_ITERATION_NS = 70e6


@dataclass(frozen=True)
class Model:
    """The shape of a transformer; `ffn_matrices` is 3 with a gated activation (SwiGLU), else 2."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    sequence: int
    ffn_matrices: int = 2
    experts: int = 1
    top_k: int = 1

    @property
    def attention_parameters(self) -> float:
        """Of one layer: query, key, value and output projections."""
        return 2.0 * self.hidden * self.hidden * (1 + self.kv_heads / self.heads)

    @property
    def expert_parameters(self) -> float:
        """Of one layer: one expert's feed-forward part (the only one in a dense model)."""
        return float(self.ffn_matrices) * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> float:
        return self.attention_parameters + self.experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> float:
        return float(self.vocab) * self.hidden

    @property
    def parameters(self) -> float:
        return self.layers * self.layer_parameters + self.embedding_parameters

    def projections_ns(self, tokens: float) -> float:
        """Forward time of one layer's attention projections: 2 FLOPs per parameter and token."""
        return 2 * tokens * self.attention_parameters / FLOP_PER_NS

    def scores_ns(self, tokens: float) -> float:
        """Forward time of one layer's causal attention: scores and values, half of 4 * sequence * hidden."""
        return 2 * tokens * self.sequence * self.hidden / FLOP_PER_NS

    def ffn_ns(self, tokens: float) -> float:
        """Forward time of one layer's feed-forward part, through the experts that are chosen for a token."""
        return 2 * tokens * self.top_k * self.expert_parameters / FLOP_PER_NS

    def layer_ns(self, tokens: float) -> float:
        """Forward time of one layer on one GPU; the backward pass takes twice as long."""
        return self.projections_ns(tokens) + self.scores_ns(tokens) + self.ffn_ns(tokens)

    def logits_ns(self, tokens: float) -> float:
        """Forward time of the projection to the vocabulary."""
        return 2 * tokens * self.embedding_parameters / FLOP_PER_NS

    def training_ns(self, tokens: float) -> float:
        """Forward and backward time of `tokens` tokens on one GPU."""
        return 3 * (self.layers * self.layer_ns(tokens) + self.logits_ns(tokens))


@dataclass(frozen=True)
class Size:
    """How large a job is.

    `model` is a key of MODELS, None the family's own. `scale` is the share of the model's compute that is kept, by
    fewer layers and, where no fewer are possible, by a smaller width; None: about LAB_ITERATION_NS of it, 1.0: the
    published model. `message_bytes` is for the families that have messages but no model.
    """

    model: str | None = None
    scale: float | None = None
    message_bytes: int | None = None


# GPT-3: Brown et al. 2020 (arXiv:2005.14165), table 2.1, feed-forward 4 * hidden, byte-pair vocabulary of GPT-2.
# Llama 2 and 3: Touvron et al. 2023 (arXiv:2307.09288), Grattafiori et al. 2024 (arXiv:2407.21783), table 3.
# Mixtral: Jiang et al. 2024 (arXiv:2401.04088), table 1; trained here at Mistral's window of 4096.
MODELS = {
    "gpt3-xl": Model(24, 2048, 8192, 24, 24, 50257, 2048),
    "gpt3-13b": Model(40, 5120, 20480, 40, 40, 50257, 2048),
    "gpt3-175b": Model(96, 12288, 49152, 96, 96, 50257, 2048),
    "llama2-70b": Model(80, 8192, 28672, 64, 8, 32000, 4096, ffn_matrices=3),
    "llama3-70b": Model(80, 8192, 28672, 64, 8, 128256, 8192, ffn_matrices=3),
    "mixtral-8x7b": Model(32, 4096, 14336, 32, 8, 32000, 4096, ffn_matrices=3, experts=8, top_k=2),
}


def find_model(size: Size, default: str) -> Model:
    """The published model that `size` names. UsageError when there is none of this name."""
    name = size.model or default
    if name not in MODELS:
        raise UsageError(f"no model {name!r}", "", f"Choose one of: {', '.join(MODELS)}")
    return MODELS[name]


def scale_model(model: Model, size: Size, tokens_per_gpu: float, layers_multiple: int) -> Model:
    """The model cut down as `size` says, to a multiple of `layers_multiple` layers.

    `tokens_per_gpu` is the tokens of an iteration divided by the GPUs they are spread over. The vocabulary shrinks
    with the layers, so that the share of the first and last stage stays that of the published model.
    """
    if size.scale is not None and not 0 < size.scale < float("inf"):
        raise UsageError(
            f"scale {size.scale} of a model", "it must be above 0", "Use 1.0 for the published model"
        )
    scale = size.scale or min(1.0, LAB_ITERATION_NS / model.training_ns(tokens_per_gpu))
    layers = max(1, math.ceil(model.layers * scale / layers_multiple - 1e-9)) * layers_multiple
    width = (model.layers * scale / layers) ** 0.5
    hidden = max(128, round(model.hidden * width / 128) * 128)
    return replace(
        model,
        layers=layers,
        hidden=hidden,
        ffn=round(model.ffn / model.hidden * hidden),
        vocab=max(128, round(model.vocab * layers / model.layers * hidden / model.hidden)),
    )


def optimizer_ns(parameters: float) -> float:
    """Time of one optimizer step over the parameters that a GPU holds."""
    return parameters * OPTIMIZER_BYTES / MEMORY_BYTES_PER_NS
