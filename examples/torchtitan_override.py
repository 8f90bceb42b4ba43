"""torchtitan with PAMM, without its trainer: an override, applied to a small LLaMA of its own.

    python examples/torchtitan_override.py

Needs pamm-torch and torchtitan 0.3. With the trainer the same override is one option on the command
line: --override.imports 'pamm.integrations.torchtitan.qkv={"method": "pamm"}'
"""

import torch
from torch import Tensor, nn
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.llama3 import llama3_configs

from pamm.nn import groups


class Attention(nn.Module):
    """In place of torchtitan's own, which is compiled for a GPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2)


def main() -> None:
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    apply_overrides(
        OverrideConfig(
            imports=[("pamm.integrations.torchtitan.qkv", {"method": "pamm", "ratio": "1/32"})]
        ),
        config,
    )
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.init_states()
    for block in model.layers.values():
        block.attention.inner_attention = Attention()
    print(f"{len(groups(model))} groups converted: {[group.name for group in groups(model)]}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = (torch.arange(65) + torch.arange(8)[:, None]) % 64
    positions = torch.arange(64).repeat(8, 1)
    for step in range(10):
        logits = model(ids[:, :-1], positions=positions)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
