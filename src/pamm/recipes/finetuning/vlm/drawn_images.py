"""An image folder by class that needs no download: textures, drawn from a seed.

    python -m pamm.recipes.finetuning.vlm.drawn_images FOLDER

writes FOLDER/train/CLASS/NUMBER.png and FOLDER/validation/CLASS/NUMBER.png. Colours, scale, phase
and noise vary from image to image; what is the same in a class is the pattern alone. Two
pairs of classes differ only in direction, and no mean colour tells any class.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

Array = np.ndarray
SIDE = 64
TRAIN, VALIDATION = 300, 50


def draw_folder(
    folder: Path, train: int = TRAIN, validation: int = VALIDATION, side: int = SIDE, seed: int = 0
) -> None:
    """Draw ``train`` and ``validation`` images of each class; the same ones for the same numbers.

    Args:
        folder: gets the subfolders train and validation.
        train, validation: images of each class.
        side: of an image, in pixels.
        seed: of everything.
    """
    from PIL import Image

    for half, (name, count) in enumerate((("train", train), ("validation", validation))):
        for number, kind in enumerate(PATTERNS):
            place = folder / name / kind
            place.mkdir(parents=True, exist_ok=True)
            for index in range(count):
                random = np.random.default_rng([seed, half, number, index])
                Image.fromarray(draw(kind, random, side)).save(place / f"{index:04}.png")


def draw(kind: str, random: np.random.Generator, side: int = SIDE) -> Array:
    """One image of a class, (side, side, 3) in uint8."""
    y, x = np.mgrid[:side, :side] / side - 0.5
    pattern = PATTERNS[kind](x, y, random)  # -1 to 1
    grey, tint = random.uniform(0.35, 0.65), random.uniform(-0.15, 0.15, (2, 3))
    swing = random.uniform(0.15, 0.35) * random.choice([-1, 1])
    image = grey + tint[0] + pattern[..., None] * (swing + swing * tint[1])
    image = image + random.normal(0, random.uniform(0.02, 0.15), image.shape)
    return (255 * image.clip(0, 1)).astype(np.uint8)


def _stripes(angle: float) -> Callable[[Array, Array, np.random.Generator], Array]:
    def pattern(x: Array, y: Array, random: np.random.Generator) -> Array:
        turned = angle + random.uniform(-0.25, 0.25)
        along = x * math.cos(turned) + y * math.sin(turned)
        return np.sin(2 * math.pi * (random.uniform(3, 9) * along + random.uniform()))

    return pattern


def _cells(x: Array, y: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Positions within the cells of a grid, -1 to 1."""
    count, shift = random.uniform(3, 7), random.uniform(0, 1, 2)
    return 2 * ((x * count + shift[0]) % 1) - 1, 2 * ((y * count + shift[1]) % 1) - 1


def _checks(x: Array, y: Array, random: np.random.Generator) -> Array:
    u, v = _cells(x, y, random)
    return np.sign(u) * np.sign(v)


def _dots(x: Array, y: Array, random: np.random.Generator) -> Array:
    u, v = _cells(x, y, random)
    return np.where(u**2 + v**2 < random.uniform(0.3, 0.7), 1.0, -1.0)


def _squares(x: Array, y: Array, random: np.random.Generator) -> Array:
    u, v = _cells(x, y, random)
    return np.where(np.maximum(abs(u), abs(v)) < random.uniform(0.45, 0.75), 1.0, -1.0)


def _rings(x: Array, y: Array, random: np.random.Generator) -> Array:
    centre = random.uniform(-0.4, 0.4, 2)
    radius = np.hypot(x - centre[0], y - centre[1])
    return np.sin(2 * math.pi * (random.uniform(3, 9) * radius + random.uniform()))


def _clouds(x: Array, y: Array, random: np.random.Generator) -> Array:
    """A sum of waves in all directions."""
    total = np.zeros_like(x)
    for _ in range(8):
        angle, count, phase = random.uniform(0, 2 * math.pi), random.uniform(2, 6), random.uniform()
        along = x * math.cos(angle) + y * math.sin(angle)
        total += np.sin(2 * math.pi * (count * along + phase))
    return total / abs(total).max()


PATTERNS = {
    "horizontal stripes": _stripes(math.pi / 2),
    "vertical stripes": _stripes(0),
    "rising stripes": _stripes(math.pi / 4),
    "falling stripes": _stripes(-math.pi / 4),
    "checks": _checks,
    "dots": _dots,
    "squares": _squares,
    "rings": _rings,
    "clouds": _clouds,
}
"""The classes, each with what draws it."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw an image folder by class.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=TRAIN, help="images of each class")
    parser.add_argument("--validation", type=int, default=VALIDATION, help="images of each class")
    parser.add_argument("--side", type=int, default=SIDE, help="pixels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw_folder(options.folder, options.train, options.validation, options.side, options.seed)


if __name__ == "__main__":
    main()
