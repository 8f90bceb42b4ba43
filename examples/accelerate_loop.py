"""A training loop of your own on Accelerate, with PAMM: one process, DDP or FSDP2.

    python examples/accelerate_loop.py
    accelerate launch --num_processes 2 examples/accelerate_loop.py
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \\
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP examples/accelerate_loop.py

Needs pamm-torch[train]. Convert before ``prepare``: sharded weights are refused.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import pamm


def main() -> None:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    report = pamm.convert(model, pamm.PammConfig("pamm", 1 / 32))
    accelerator.print(report)
    optimizer = torch.optim.AdamW(pamm.param_groups(model, lr=3e-3, lr_factor=0.5))
    ids = (torch.arange(32) + torch.arange(256)[:, None]) % 64
    loader = DataLoader(list(ids), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    pamm.seek(model, step)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            pamm.seek(model, step)  # a run resumed at this step draws what this one draws
            accelerator.print(f"step {step}: loss {loss.item():.3f}")
    # The model goes before the processes part: it would take gloo's threads down with it, and wait
    # for them while they wait for Python.
    accelerator.wait_for_everyone()
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
