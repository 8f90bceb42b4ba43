"""How near PAMM's gradient is to the exact one on padded rows, with and without drawing padding.

    python benchmarks/finetune_padding.py MODEL GLUE_FOLDER RESULTS.jsonl

Full fine-tuning's first step of an encoder on one task's rows: for each batch the cosine between
all q/k/v weight gradients and the exact ones, for several draws, without dropout.
"""

import argparse
import statistics
from pathlib import Path

import torch
from transformers import set_seed

import pamm
from pamm.bench.records import append, environment
from pamm.padding import skip_padding
from pamm.recipes.finetuning.glue.tasks import TASKS, read_task
from pamm.recipes.finetuning.glue.training import Encoded, Pad, load


def gradient(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of all q/k/v weights, as one vector."""
    model.zero_grad()
    model(**batch).loss.backward()
    wanted = ("query.weight", "key.weight", "value.weight")
    return torch.cat([p.grad.flatten() for n, p in model.named_parameters() if n.endswith(wanted)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("results", type=Path, help="append records to this file")
    parser.add_argument("--task", default="cola", choices=TASKS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--draws", type=int, default=8)
    options = parser.parse_args()
    set_seed(0)
    task = TASKS[options.task]
    tokenizer, model = load(options.model, task)
    rows = Encoded(read_task(options.task, options.data)[0], tokenizer, 128, task)
    pad, order = Pad(tokenizer), torch.randperm(len(rows)).tolist()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in vars(model.config):  # attention's own dropout is read from here by some models
        if name.endswith("dropout_prob") or name.endswith("dropout"):
            setattr(model.config, name, 0.0)
    size = options.batch
    batches = [pad([rows[i] for i in order[at * size :][:size]]) for at in range(options.batches)]
    exact = [gradient(model, batch) for batch in batches]
    again = gradient(model, batches[0])
    assert torch.equal(again, exact[0]), "the exact gradient is not the same twice: dropout is on"
    shares = [1 - batch["attention_mask"].float().mean().item() for batch in batches]
    for ratio in ("1/16", "1/128", "1/256"):
        for skips in (False, True):
            pamm.convert(model, pamm.PammConfig("pamm", ratio))  # type: ignore[arg-type]
            if skips:
                stop = skip_padding(model)
            cosines = [
                torch.cosine_similarity(gradient(model, batch), wanted, dim=0).item()
                for batch, wanted in zip(batches, exact, strict=True)
                for _ in range(options.draws)
            ]
            if skips:
                stop()
            pamm.revert(model)
            record = {
                "benchmark": "finetune_padding",
                "model": Path(options.model).name,
                "task": options.task,
                "batch": size,
                "padding_share": statistics.mean(shares),
                "ratio": ratio,
                "skip_padding": skips,
                "cosine_mean": statistics.mean(cosines),
                "cosine_stdev": statistics.stdev(cosines),
                "gradients": len(cosines),
                **environment(torch.device("cpu")),
            }
            append(options.results, [record])
            print(record)


if __name__ == "__main__":
    main()
