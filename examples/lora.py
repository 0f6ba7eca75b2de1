"""Fine-tune a transformers model with LoRA: its weights are frozen, and thin matrices beside them learn.

pip install transformers
python examples/lora.py
torchrun --nproc-per-node 2 examples/lora.py
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import minidist as md
from minidist.model import Sampler, dataset


class LoRA(nn.Module):
    """Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # at first the layer is what it was

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        return self.layer(x) + self.up(self.down(x))


def llama() -> LlamaForCausalLM:
    """A small Llama with random weights; take LlamaForCausalLM.from_pretrained(folder) if you have one."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, LoRA(linear))
    model.lm_head = LoRA(model.lm_head)
    return model


def train(steps: int = 60) -> float:
    torch.manual_seed(0)
    data, model = dataset("bytes", length=64, limit=2000), llama()
    engine = md.prepare(model, partial(torch.optim.AdamW, lr=1e-2), md.Layout(dp=md.size(), zero=2))
    sampler = Sampler(len(data.train), 32, rank=engine.data_rank, ranks=engine.data_ranks)
    for step in range(steps):
        tokens, _ = data.train[sampler.share(step)]
        loss = engine.step({"input_ids": tokens, "labels": tokens})  # the model's own loss
        if md.rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")
    held_out, _ = data.test[md.rank() : 64 : md.size()]
    return engine.evaluate({"input_ids": held_out, "labels": held_out})


if __name__ == "__main__":
    print(f"loss of held-out text: {md.launch(train, ranks=2)[0]:.3f}")
