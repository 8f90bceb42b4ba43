"""Images by class as questions and answers: what the model reads, and which answers it may give."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from pamm.errors import PammError
from pamm.recipes.finetuning.vlm.image_folder import Images

IGNORED = -100  # labels that the loss leaves out


def question(classes: Sequence[str]) -> str:
    """The same for each image."""
    return f"Which of these does the image show? {', '.join(classes)}. Answer with one of them."


class ImageRows(Dataset):
    """Images and their classes; those to train on get an answer."""

    def __init__(self, images: Images, answered: bool) -> None:
        self._images, self._answered = images, answered

    def __len__(self) -> int:
        return len(self._images.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        images = self._images
        return {
            "path": images.paths[index],
            "label": images.labels[index],
            "answered": self._answered,
        }


class Questions:
    """Makes a batch of rows: a processor's tensors, with labels.

    Labels are token ids, ``IGNORED`` but for the answer; of rows without one, class numbers.

    Args:
        processor: of the model.
        classes: names, in the order of their numbers.
        image_size: pixels to scale each side to; ``None`` leaves images as they are.

    Raises:
        PammError: if the tokenizer cannot tell two names apart, or the processor does not know how
            to write a question down.
    """

    def __init__(self, processor: Any, classes: Sequence[str], image_size: int | None) -> None:
        self._processor, self._size = processor, image_size
        tokenizer = processor.tokenizer
        tokenizer.padding_side = "left"  # answers follow at once
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.pad, self.end = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.answers = [
            [*tokenizer(name, add_special_tokens=False)["input_ids"], self.end] for name in classes
        ]
        if len({tuple(answer) for answer in self.answers}) < len(classes):
            raise PammError(f"the tokenizer has the same tokens for two of: {', '.join(classes)}.")
        self._prompt = self._template(question(classes))
        begins = tokenizer.bos_token is not None and self._prompt.startswith(tokenizer.bos_token)
        self._text: dict[str, Any] = {"add_special_tokens": not begins}

    def _template(self, text: str) -> str:
        """As the model was taught to be asked, if its processor knows."""
        if not getattr(self._processor, "chat_template", None):
            image = getattr(self._processor, "image_token", None)
            if image is None:
                raise PammError(
                    f"{type(self._processor).__name__} has neither a chat_template nor an "
                    "image_token, so how to ask about an image is not known. Give it a template."
                )
            return f"{image}\n{text}\n"
        content = [{"type": "image"}, {"type": "text", "text": text}]
        return self._processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The batch."""
        batch = dict(
            self._processor(
                images=[[self._open(row["path"])] for row in rows],
                text=[self._prompt] * len(rows),
                padding=True,
                return_tensors="pt",
                **self._text,
            )
        )
        if not rows[0]["answered"]:
            return {**batch, "labels": torch.tensor([row["label"] for row in rows])}
        answers = [self.answers[row["label"]] for row in rows]
        width = max(len(answer) for answer in answers)
        ids = torch.tensor([[*a, *[self.pad] * (width - len(a))] for a in answers])
        is_answer = torch.tensor([[i < len(a) for i in range(width)] for a in answers])
        prompt = batch["input_ids"]
        added = {"input_ids": ids, "attention_mask": is_answer.to(batch["attention_mask"].dtype)}
        for name, tensor in batch.items():
            if tensor.shape == prompt.shape:  # one entry for each token
                more = added.get(name, torch.zeros_like(ids, dtype=tensor.dtype))
                batch[name] = torch.cat([tensor, more], dim=1)
        labels = ids.masked_fill(~is_answer, IGNORED)
        return {**batch, "labels": torch.cat([torch.full_like(prompt, IGNORED), labels], dim=1)}

    def _open(self, path: Path) -> Image.Image:
        with Image.open(path) as image:
            made = image.convert("RGB")
        return made if self._size is None else made.resize((self._size, self._size))

    def next_tokens(self, begun: Sequence[int]) -> list[int]:
        """What may follow the tokens of an answer: how names that begin so go on, or the end."""
        count = len(begun)
        fits = [a[count] for a in self.answers if len(a) > count and a[:count] == list(begun)]
        return list(dict.fromkeys(fits)) or [self.end]

    def class_of(self, tokens: Sequence[int]) -> int:
        """Number of the class whose name these tokens begin with; -1 if it is none."""
        matches = (i for i, a in enumerate(self.answers) if list(tokens[: len(a)]) == a)
        return next(matches, -1)
